"""The difference between two identities, for people."""

from collections.abc import Iterator
from typing import Any


def diff_values(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """One line for each key whose value is not the same."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            inner = f"{key}.{name}" if key else str(name)
            if name not in old:
                yield f"{inner}: was not set, now {new[name]!r}"
            elif name not in new:
                yield f"{inner}: was {old[name]!r}, now not set"
            else:
                yield from diff_values(old[name], new[name], inner)
    elif old != new:
        yield f"{key}: was {old!r}, now {new!r}"
