"""Parse a tool's docstring into the descriptions that the model sees, following Google's `Args:` sections."""

import inspect
import re
from typing import NamedTuple

_SECTION_PATTERN = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Example|Examples|Notes?):\s*$")
_ARGUMENT_SECTIONS = ("Args", "Arguments", "Parameters")
_PARAMETER_PATTERN = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class ParsedDocstring(NamedTuple):
    """The description in a docstring, and the descriptions of the parameters by name."""

    description: str
    parameters: dict[str, str]


def parse_docstring(text: str | None) -> ParsedDocstring:
    """Return the text before the first section and the items of the `Args:` section; ignore other sections."""
    description_lines: list[str] = []
    items: list[tuple[str, list[str]]] = []  # the lines of each parameter
    section, base_indent = "", 0
    for line in inspect.cleandoc(text or "").splitlines():
        if header := _SECTION_PATTERN.match(line):
            section, base_indent = header[1], 0
        elif not section:
            description_lines.append(line)
        elif section in _ARGUMENT_SECTIONS and line.strip():
            indent = len(line) - len(line.lstrip())
            base_indent = base_indent or indent
            if indent == base_indent and (match := _PARAMETER_PATTERN.match(line.strip())):
                items.append((match[1], [match[2]]))
            elif items:
                items[-1][1].append(line.strip())
    parameters = {name: " ".join(filter(None, lines)) for name, lines in items}
    return ParsedDocstring("\n".join(description_lines).strip(), parameters)
