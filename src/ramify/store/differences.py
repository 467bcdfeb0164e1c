"""Differences between two nested values, as lines of text."""

from collections.abc import Iterator
from typing import Any


def diff_values(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """Yield one line for each key whose value differs, such as `sampling.top_p: was 1.0, now 0.9`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            inner_key = f"{key}.{name}" if key else str(name)
            if name not in old:
                yield f"{inner_key}: was not set, now {new[name]!r}"
            elif name not in new:
                yield f"{inner_key}: was {old[name]!r}, now not set"
            else:
                yield from diff_values(old[name], new[name], inner_key)
    elif old != new:
        yield f"{key}: was {old!r}, now {new!r}"
