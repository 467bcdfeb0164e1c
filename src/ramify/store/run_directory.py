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
from ramify.store.differences import diff_values
from ramify.store.environments import CHANGES_ACCEPTED_EVENT, RESUME_HINT
from ramify.store.run_log import RunLog
from ramify.store.run_store import BLOCKING_CHANGE_TIMEOUT, RunStore, acquire_lock

IDENTITY_KEY = "identity"
MODEL_KEY = "model"  # the key of an identity whose change cannot be accepted
NEW_RUN_HINT = "give it another --name, or --fresh to move the old one aside and begin anew"
POLL_INTERVAL = 0.1  # seconds between two looks at a run that somebody holds


def open_run(
    path: Path,
    identity: Mapping[str, Any],
    *,
    fresh: bool = False,
    accept_changes: bool | None = None,
    lock_timeout: float = 0.0,
) -> RunStore:
    """Open the run at `path`, new or continued. Raises ConfigInvalid if it is another run.

    With `accept_changes`, a run with another identity is continued and the change is recorded; None means that the
    command has no such option, so the message does not mention it. If another process holds the run, this waits for
    `patience` seconds before it raises RunBusy.
    """
    end = time.monotonic() + lock_timeout
    while True:
        try:
            return _open_once(path, identity, fresh, accept_changes)
        except RunBusy:
            if time.monotonic() >= end:
                raise
        time.sleep(POLL_INTERVAL)


def _open_once(path: Path, identity: Mapping[str, Any], fresh: bool, accept_changes: bool | None) -> RunStore:
    if fresh and path.exists():
        move_aside(path)
    store = RunStore.open(path, required_fact=IDENTITY_KEY)
    try:
        _record_identity(store, dict(identity), accept_changes)
    except BaseException:
        store.close()
        raise
    return store


def _record_identity(store: RunStore, identity: dict[str, Any], accept_changes: bool | None) -> None:
    """Store the identity of a new run, or check that it is the same; raise ConfigInvalid if it is not."""
    changes = check_identity(store, identity, accept_changes)
    if changes:
        RunLog(store).log_event(CHANGES_ACCEPTED_EVENT, changes=changes).result(BLOCKING_CHANGE_TIMEOUT)
    if changes or store.get_fact(IDENTITY_KEY) is None:
        store.set_fact(IDENTITY_KEY, identity)


def check_identity(store: RunStore, identity: Mapping[str, Any], accept_changes: bool | None) -> list[str]:
    """Return the differences from the stored identity if they are accepted; raise ConfigInvalid if they are not."""
    known: dict[str, Any] | None = store.get_fact(IDENTITY_KEY)
    changes = [] if known is None else list(diff_values(known, dict(identity)))
    if known is None or not changes:
        return []
    same_model = known.get(MODEL_KEY) == identity.get(MODEL_KEY)
    if accept_changes and same_model:
        return changes
    lines = "".join(f"\n  {line}" for line in changes)
    ways = f"give it another --name; or {RESUME_HINT}" if accept_changes is False and same_model else NEW_RUN_HINT
    raise ConfigInvalid(f"{store.path} is another run; what differs:{lines}\n{ways}")


def move_aside(path: Path) -> Path:
    """Move the run to a name that is free beside it. Raises RunBusy while somebody holds it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    lock = acquire_lock(path)
    try:
        path.rename(aside)
    finally:
        os.close(lock)
    return aside
