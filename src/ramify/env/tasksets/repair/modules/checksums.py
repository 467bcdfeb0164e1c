"""Checksums of digits and texts."""


def luhn_sum(digits: str) -> int:
    """Return the Luhn sum: from the right, every second digit is doubled, minus 9 if that is more than 9."""
    total = 0
    for position, digit in enumerate(reversed(digits)):
        value = int(digit)
        if position % 2 == 1:
            value *= 2
            if value > 9:
                value -= 9
        total += value
    return total


def is_valid_card(number: str) -> bool:
    """Return whether a number, which may contain spaces, has 12 to 19 digits and a Luhn sum that 10 divides."""
    digits = number.replace(" ", "")
    if not digits.isdigit() or len(digits) < 12 or len(digits) > 19:
        return False
    return luhn_sum(digits) % 10 == 0


def is_valid_isbn(isbn: str) -> bool:
    """Return whether an ISBN of ten characters is valid. Hyphens are ignored, and the last character may be X for 10.

    The sum of all digits, the first times 10, the next times 9 and so on, must be a multiple of 11.
    """
    characters = isbn.replace("-", "")
    if len(characters) != 10:
        return False
    total = 0
    for index, character in enumerate(characters):
        if character == "X" and index == 9:
            value = 10
        elif character.isdigit():
            value = int(character)
        else:
            return False
        total += value * (10 - index)
    return total % 11 == 0
