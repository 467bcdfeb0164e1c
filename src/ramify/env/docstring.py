"""What a docstring says to a model: the description, and a line for each parameter (Google's `Args:` section)."""

import inspect
import re
from typing import NamedTuple

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Example|Examples|Notes?):\s*$")
_ARGUMENTS = ("Args", "Arguments", "Parameters")
_PARAMETER = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class Docstring(NamedTuple):
    """A docstring in parts."""

    description: str
    parameters: dict[str, str]


def read_docstring(text: str | None) -> Docstring:
    """The text before the first section, and the entries of the `Args:` section; other sections are left out."""
    before: list[str] = []
    entries: list[tuple[str, list[str]]] = []
    section, margin = "", 0
    for line in inspect.cleandoc(text or "").splitlines():
        if header := _SECTION.match(line):
            section, margin = header[1], 0
        elif not section:
            before.append(line)
        elif section in _ARGUMENTS and line.strip():
            indent = len(line) - len(line.lstrip())
            margin = margin or indent
            if indent == margin and (entry := _PARAMETER.match(line.strip())):
                entries.append((entry[1], [entry[2]]))
            elif entries:
                entries[-1][1].append(line.strip())
    return Docstring("\n".join(before).strip(), {name: " ".join(filter(None, lines)) for name, lines in entries})
