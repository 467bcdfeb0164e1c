"""Which directory a run is, and whether it may be continued.

One rule for all commands: the same command again continues its run. What makes it the same is the run's *identity*; all
else (how many, how fast, where the server is) may change from one start to the next. A run whose identity differs would
mix results that cannot be compared, so it is refused, with the difference shown.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ramify.errors import ConfigInvalid
from ramify.store.store import RunStore, locked

IDENTITY = "identity"


def open_run(path: Path, identity: Mapping[str, Any], *, fresh: bool = False) -> RunStore:
    """The run at `path`, new or continued. Raises ConfigInvalid if it is another run."""
    if fresh and path.exists():
        set_aside(path)
    store = RunStore.open(path)
    known = store.fact(IDENTITY)
    if known is None:
        store.remember(IDENTITY, dict(identity))
        return store
    changed = list(difference(known, dict(identity)))
    if changed:
        store.close()
        lines = "".join(f"\n  {line}" for line in changed)
        raise ConfigInvalid(
            f"{path} is another run; what differs:{lines}\n"
            f"give it another --name, or --fresh to move the old one aside and begin anew"
        )
    return store


def set_aside(path: Path) -> Path:
    """Move the run to a name that is free beside it. Raises RunBusy while somebody holds it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    lock = locked(path)
    try:
        path.rename(aside)
    finally:
        os.close(lock)
    return aside


def difference(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """One line for each key whose value is not the same."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            inner = f"{key}.{name}" if key else str(name)
            if name not in old:
                yield f"{inner}: was not set, now {new[name]!r}"
            elif name not in new:
                yield f"{inner}: was {old[name]!r}, now not set"
            else:
                yield from difference(old[name], new[name], inner)
    elif old != new:
        yield f"{key}: was {old!r}, now {new!r}"
