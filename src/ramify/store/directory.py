"""Which directory a run is, and whether it may be continued.

One rule for all commands: the same command again continues its run. What makes it the same is the run's *identity*; all
else (how many, how fast, where the server is) may change from one start to the next. A run whose identity differs would
mix results that cannot be compared, so it is refused, with the difference shown.
"""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ramify.errors import ConfigInvalid, RunBusy
from ramify.store.store import RunStore, locked

IDENTITY = "identity"
POLL = 0.1  # seconds between two looks at a run that somebody holds


def open_run(path: Path, identity: Mapping[str, Any], *, fresh: bool = False, patience: float = 0.0) -> RunStore:
    """The run at `path`, new or continued. Raises ConfigInvalid if it is another run.

    Somebody may hold it for a moment, to read it or because he is about to end: `patience` is the seconds he gets
    before this raises RunBusy.
    """
    end = time.monotonic() + patience
    while True:
        try:
            return _opened(path, identity, fresh)
        except RunBusy:
            if time.monotonic() >= end:
                raise
        time.sleep(POLL)


def _opened(path: Path, identity: Mapping[str, Any], fresh: bool) -> RunStore:
    if fresh and path.exists():
        set_aside(path)
    store = RunStore.open(path)
    try:
        _identify(store, dict(identity))
    except BaseException:
        store.close()
        raise
    return store


def _identify(store: RunStore, identity: dict[str, Any]) -> None:
    """Remember what the run is, or check that it is the same; raises ConfigInvalid if it is not."""
    known = store.fact(IDENTITY)
    if known is None:
        store.remember(IDENTITY, identity)
    elif changed := list(difference(known, identity)):
        lines = "".join(f"\n  {line}" for line in changed)
        raise ConfigInvalid(
            f"{store.path} is another run; what differs:{lines}\n"
            f"give it another --name, or --fresh to move the old one aside and begin anew"
        )


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
