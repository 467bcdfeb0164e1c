"""Where a line stands in a module, for tests of messages that name it."""

import inspect
from types import ModuleType


def line_number(module: ModuleType, text: str) -> int:
    """Return the number of the line of a module that holds `text`, which only one does."""
    (number,) = (number for number, line in enumerate(inspect.getsource(module).splitlines(), 1) if text in line)
    return number
