"""Which directory a run is, and whether it may be continued.

One rule for all commands: the same command again continues its run. What makes it the same is the run's *identity*; all
else (how many, how fast, where the server is) may change from one start to the next. A run whose identity differs would
mix results that cannot be compared, so it is refused, with the difference shown. The user may accept the difference,
except that of the model. `ramify.store.environments` does the same for the code and the tasks of environments.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ramify.errors import ConfigInvalid, RunBusy
from ramify.store.differences import difference
from ramify.store.environments import ACCEPTED, RESUME_OPTIONS
from ramify.store.journal import Journal
from ramify.store.store import OPENING, RunStore, locked

IDENTITY = "identity"
MODEL = "model"  # the key of an identity whose change cannot be accepted
NEW_RUN_OPTIONS = "give it another --name, or --fresh to move the old one aside and begin anew"
POLL = 0.1  # seconds between two looks at a run that somebody holds


def open_run(
    path: Path,
    identity: Mapping[str, Any],
    *,
    fresh: bool = False,
    accept_changes: bool | None = None,
    patience: float = 0.0,
) -> RunStore:
    """Open the run at `path`, new or continued. Raises ConfigInvalid if it is another run.

    With `accept_changes`, a run with another identity is continued and the change is recorded; None means that the
    command has no such option, so the message does not mention it. If another process holds the run, this waits for
    `patience` seconds before it raises RunBusy.
    """
    end = time.monotonic() + patience
    while True:
        try:
            return _opened(path, identity, fresh, accept_changes)
        except RunBusy:
            if time.monotonic() >= end:
                raise
        time.sleep(POLL)


def _opened(path: Path, identity: Mapping[str, Any], fresh: bool, accept: bool | None) -> RunStore:
    if fresh and path.exists():
        set_aside(path)
    store = RunStore.open(path, required=IDENTITY)
    try:
        _identify(store, dict(identity), accept)
    except BaseException:
        store.close()
        raise
    return store


def _identify(store: RunStore, identity: dict[str, Any], accept: bool | None) -> None:
    """Store the identity of a new run, or check that it is the same; raise ConfigInvalid if it is not."""
    changes = check_identity(store, identity, accept)
    if changes:
        Journal(store).note(ACCEPTED, changes=changes).result(OPENING)
    if changes or store.fact(IDENTITY) is None:
        store.remember(IDENTITY, identity)


def check_identity(store: RunStore, identity: Mapping[str, Any], accept: bool | None) -> list[str]:
    """Return the differences from the stored identity if they are accepted; raise ConfigInvalid if they are not."""
    known: dict[str, Any] | None = store.fact(IDENTITY)
    changes = [] if known is None else list(difference(known, dict(identity)))
    if known is None or not changes:
        return []
    same_model = known.get(MODEL) == identity.get(MODEL)
    if accept and same_model:
        return changes
    lines = "".join(f"\n  {line}" for line in changes)
    ways = f"give it another --name; or {RESUME_OPTIONS}" if accept is False and same_model else NEW_RUN_OPTIONS
    raise ConfigInvalid(f"{store.path} is another run; what differs:{lines}\n{ways}")


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
