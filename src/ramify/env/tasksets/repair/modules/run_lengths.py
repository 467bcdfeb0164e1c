"""Run-length encoding of texts."""


def find_runs(text: str) -> list[list[str | int]]:
    """Return each run of equal characters and its length: "aab" -> [["a", 2], ["b", 1]]."""
    runs: list[list[str | int]] = []
    start = 0
    for index in range(1, len(text) + 1):
        if index == len(text) or text[index] != text[start]:
            runs.append([text[start], index - start])
            start = index
    return runs


def compress(text: str) -> str:
    """Return the text with every run of 3 or more written as its length and its character: "aaab" -> "3ab"."""
    parts: list[str] = []
    for character, length in find_runs(text):
        parts.append(f"{length}{character}" if int(length) >= 3 else str(character) * int(length))
    return "".join(parts)


def longest_run(text: str) -> str:
    """Return the longest run of equal characters, the first one if several are equally long; "" for an empty text."""
    best, best_length = "", 0
    for character, length in find_runs(text):
        if int(length) > best_length:
            best, best_length = str(character), int(length)
    return best * best_length
