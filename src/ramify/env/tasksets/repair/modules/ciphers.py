"""Old ciphers on letters. Other characters stay as they are, and capital letters stay capital."""


def shift_letter(letter: str, offset: int) -> str:
    """Return the letter that stands `offset` places later in the alphabet, which starts again after its end."""
    if "a" <= letter <= "z":
        return chr((ord(letter) - ord("a") + offset) % 26 + ord("a"))
    if "A" <= letter <= "Z":
        return chr((ord(letter) - ord("A") + offset) % 26 + ord("A"))
    return letter


def encrypt_caesar(text: str, offset: int) -> str:
    """Return the text with every letter shifted by `offset`."""
    return "".join(shift_letter(character, offset) for character in text)


def encrypt_vigenere(text: str, key: str) -> str:
    """Return the text with each letter shifted by the next letter of the lower-case key: a is 0, b is 1, ...

    Characters that are not letters of the alphabet do not use up a letter of the key.
    """
    result: list[str] = []
    position = 0
    for character in text:
        if character.isalpha():
            result.append(shift_letter(character, ord(key[position % len(key)]) - ord("a")))
            position += 1
        else:
            result.append(character)
    return "".join(result)


def encrypt_rails(text: str, rails: int) -> str:
    """Return the text written in a zigzag over `rails` (2 or more) rows and read row by row: ("abcd", 2) -> "acbd"."""
    rows = [""] * rails
    row, step = 0, 1
    for character in text:
        rows[row] += character
        if row + step < 0 or row + step >= rails:
            step = -step
        row += step
    return "".join(rows)
