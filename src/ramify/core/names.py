"""Names, nouns and numbers in messages: the closest known name, duplicate names, counts and durations."""

import difflib
from collections import Counter
from collections.abc import Iterable


def format_duration(seconds: float) -> str:
    """Return a duration in the form `42s`, `3m05s` or `1h02m`."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    minutes, remainder = divmod(total, 60)
    return f"{minutes}m{remainder:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


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


def format_count(number: float, noun: str) -> str:
    """Return a number with its noun, such as `1 branch` and `2 branches`."""
    plural = f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{number if isinstance(number, int) else f'{number:g}'} {noun if number == 1 else plural}"
