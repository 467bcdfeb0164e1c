"""What a docstring says to a model: the description, and a line for each parameter (Google's `Args:` section)."""

import inspect
import re
from typing import NamedTuple

_SECTION_PATTERN = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Example|Examples|Notes?):\s*$")
_ARGUMENT_SECTIONS = ("Args", "Arguments", "Parameters")
_PARAMETER_PATTERN = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class ParsedDocstring(NamedTuple):
    """A docstring in parts."""

    description: str
    parameters: dict[str, str]


def parse_docstring(text: str | None) -> ParsedDocstring:
    """The text before the first section, and the entries of the `Args:` section; other sections are left out."""
    description_lines: list[str] = []
    entries: list[tuple[str, list[str]]] = []
    section, base_indent = "", 0
    for line in inspect.cleandoc(text or "").splitlines():
        if header := _SECTION_PATTERN.match(line):
            section, base_indent = header[1], 0
        elif not section:
            description_lines.append(line)
        elif section in _ARGUMENT_SECTIONS and line.strip():
            indent = len(line) - len(line.lstrip())
            base_indent = base_indent or indent
            if indent == base_indent and (entry := _PARAMETER_PATTERN.match(line.strip())):
                entries.append((entry[1], [entry[2]]))
            elif entries:
                entries[-1][1].append(line.strip())
    return ParsedDocstring(
        "\n".join(description_lines).strip(), {name: " ".join(filter(None, lines)) for name, lines in entries}
    )
