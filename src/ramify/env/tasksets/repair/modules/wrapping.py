"""Lines of text of a limited width."""


def wrap_words(text: str, width: int) -> list[str]:
    """Return lines of at most `width` characters with as many words as fit. A longer word has a line of its own."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    if line:
        lines.append(line)
    return lines


def center(text: str, width: int) -> str:
    """Return the text between spaces, `width` characters long. An odd space stands on the right; no text is cut."""
    spaces = max(width - len(text), 0)
    before = spaces // 2
    return " " * before + text + " " * (spaces - before)


def shorten(text: str, width: int) -> str:
    """Return the text, or its first characters and "..." if it is longer than `width` (at least 3) characters."""
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."
