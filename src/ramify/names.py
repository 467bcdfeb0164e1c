"""Checks of names that a user wrote: the closest known name, and names that occur more than once."""

import difflib
from collections import Counter
from collections.abc import Iterable

CUTOFF = 0.6  # similarity from which a name counts as misspelt


def find_similar(name: str, known_names: Iterable[str], *, cutoff: float = CUTOFF) -> str | None:
    """Return the known name that is closest to `name`; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known_names), n=1, cutoff=cutoff)), None)


def suggest(name: str, known_names: Iterable[str], otherwise: str, template: str = "{!r}") -> str:
    """Return `did you mean 'NAME'?` with the closest known name, or `otherwise` if none is similar."""
    similar = find_similar(name, known_names)
    return otherwise if similar is None else f"did you mean {template.format(similar)}?"


def find_duplicates(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, sorted."""
    return sorted(name for name, count in Counter(names).items() if count > 1)
