"""Roman numerals from 1 to 3999."""

SYMBOLS = [
    (1000, "M"),
    (900, "CM"),
    (500, "D"),
    (400, "CD"),
    (100, "C"),
    (90, "XC"),
    (50, "L"),
    (40, "XL"),
    (10, "X"),
    (9, "IX"),
    (5, "V"),
    (4, "IV"),
    (1, "I"),
]


def to_roman(number: int) -> str:
    """Return the numeral of a number from 1 to 3999. Raises ValueError for any other number."""
    if number < 1 or number > 3999:
        raise ValueError("expected a number from 1 to 3999")
    numeral = ""
    for value, symbol in SYMBOLS:
        while number >= value:
            numeral += symbol
            number -= value
    return numeral


def from_roman(numeral: str) -> int:
    """Return the value of a numeral. A symbol before a larger one is subtracted: "XIV" -> 14."""
    values = {symbol: value for value, symbol in SYMBOLS}
    total = 0
    for index, symbol in enumerate(numeral):
        value = values[symbol]
        if index + 1 < len(numeral) and values[numeral[index + 1]] > value:
            total -= value
        else:
            total += value
    return total
