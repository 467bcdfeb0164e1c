"""How similar two texts are."""


def edit_distance(first: str, second: str) -> int:
    """Return the smallest number of characters to insert, delete or replace that turns one text into the other."""
    previous = list(range(len(second) + 1))
    for row, character in enumerate(first, 1):
        current = [row]
        for column, other in enumerate(second, 1):
            cost = 0 if character == other else 1
            current.append(min(previous[column] + 1, current[column - 1] + 1, previous[column - 1] + cost))
        previous = current
    return previous[-1]


def common_prefix(texts: list[str]) -> str:
    """Return the longest text that all texts begin with; "" if there are no texts."""
    if not texts:
        return ""
    prefix = texts[0]
    for text in texts[1:]:
        while not text.startswith(prefix):
            prefix = prefix[:-1]
    return prefix


def longest_common_substring(first: str, second: str) -> str:
    """Return the longest text that is part of both texts; of several, the one that ends first in `first`."""
    best = ""
    lengths = [0] * (len(second) + 1)
    for row in range(1, len(first) + 1):
        next_lengths = [0]
        for column in range(1, len(second) + 1):
            length = lengths[column - 1] + 1 if first[row - 1] == second[column - 1] else 0
            next_lengths.append(length)
            if length > len(best):
                best = first[row - length : row]
        lengths = next_lengths
    return best
