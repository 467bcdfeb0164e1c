"""Brackets in texts: (), [] and {}. All other characters are ignored."""

PAIRS = {")": "(", "]": "[", "}": "{"}


def is_balanced(text: str) -> bool:
    """Return whether every bracket is closed by its partner, in the right order."""
    opened: list[str] = []
    for character in text:
        if character in PAIRS.values():
            opened.append(character)
        elif character in PAIRS:
            if not opened or opened[-1] != PAIRS[character]:
                return False
            opened.pop()
    return not opened


def max_depth(text: str) -> int:
    """Return the largest number of brackets that are open at once; brackets that close too many are ignored."""
    depth = deepest = 0
    for character in text:
        if character in PAIRS.values():
            depth += 1
            deepest = max(deepest, depth)
        elif character in PAIRS and depth > 0:
            depth -= 1
    return deepest


def count_missing(text: str) -> int:
    """Return how many round brackets must be added to balance the round brackets of the text."""
    opened = missing = 0
    for character in text:
        if character == "(":
            opened += 1
        elif character == ")":
            if opened > 0:
                opened -= 1
            else:
                missing += 1
    return missing + opened
