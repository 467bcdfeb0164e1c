"""Whole numbers in other notations."""

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def to_base(number: int, base: int) -> str:
    """Return a number in a base from 2 to 36, in lower case, with "-" before negative ones: (255, 16) -> "ff"."""
    if number == 0:
        return "0"
    digits = ""
    rest = abs(number)
    while rest > 0:
        digits = DIGITS[rest % base] + digits
        rest //= base
    return "-" + digits if number < 0 else digits


def group_thousands(number: int) -> str:
    """Return a number with a comma before each group of three digits: 1234567 -> "1,234,567"."""
    digits = str(abs(number))
    groups: list[str] = []
    while len(digits) > 3:
        groups.insert(0, digits[-3:])
        digits = digits[:-3]
    groups.insert(0, digits)
    return ("-" if number < 0 else "") + ",".join(groups)


def to_ordinal(number: int) -> str:
    """Return a positive number with its English ending: 1st, 2nd, 3rd, 4th, 11th, 12th, 13th, 21st, 111th."""
    if 11 <= number % 100 <= 13:
        return f"{number}th"
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{endings.get(number % 10, 'th')}"


def count_ones(number: int) -> int:
    """Return how many ones the binary form of a non-negative number has."""
    count = 0
    while number > 0:
        count += number % 2
        number //= 2
    return count
