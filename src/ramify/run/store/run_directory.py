"""Opening a run directory, new or resumed.

One rule for all commands: repeating a command resumes its run. A run is the same if its *identity* is equal; other
settings (the number of rollouts, the concurrency, the address of the server) may change between two starts. Resuming
with another identity would mix results that cannot be compared, so it is refused, with the differences. The user may
accept differences, except another model or other adapters, for which no checkpoint fits.
`ramify.run.store.environments` does the same for the code and the tasks of environments.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ramify.core.errors import ConfigInvalid, RunBusy
from ramify.core.watchdog import watch_storage
from ramify.run.store.environments import CHANGES_ACCEPTED_EVENT, RESUME_HINT, diff_values
from ramify.run.store.run_log import RunLog
from ramify.run.store.run_store import RunStore, acquire_lock

IDENTITY_KEY = "identity"
FIXED_KEYS = ("model", "lora", "model.quantize")  # keys of an identity whose change cannot be accepted
NEW_RUN_HINT = "use another --name, or --fresh to move the old run aside and start a new one"
T = TypeVar("T")
POLL_INTERVAL = 0.1  # seconds between two attempts to lock a run


def open_run(
    path: Path,
    identity: Mapping[str, Any],
    *,
    fresh: bool = False,
    accept_changes: bool | None = None,
    lock_timeout: float = 0.0,
) -> RunStore:
    """Open the run at `path`, new or resumed. Raises ConfigInvalid if its identity is another.

    With `fresh`, an existing run is moved aside first. With `accept_changes`, a run with another identity is resumed
    and the change is recorded; None means that the command has no such option, so the message does not mention it. If
    another process holds the run's lock, wait up to `lock_timeout` seconds for it, then raise RunBusy.
    """
    return retry_while_busy(partial(_open_once, path, identity, fresh, accept_changes), lock_timeout)


def retry_while_busy(function: Callable[[], T], timeout: float) -> T:
    """Call a function that locks a run. While another process holds the lock, try again for `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return function()
        except RunBusy:
            if time.monotonic() >= deadline:
                raise
        time.sleep(POLL_INTERVAL)


def _open_once(path: Path, identity: Mapping[str, Any], fresh: bool, accept_changes: bool | None) -> RunStore:
    if fresh and path.exists():
        move_aside(path)
    store = RunStore.open(path, required_fact=IDENTITY_KEY)
    try:
        changes = check_identity(store, identity, accept_changes)
        if changes:
            RunLog(store).log_event(CHANGES_ACCEPTED_EVENT, changes=changes).result()
        if changes or store.get_fact(IDENTITY_KEY) is None:
            store.set_fact(IDENTITY_KEY, dict(identity))
    except BaseException:
        store.close()
        raise
    return store


def check_identity(store: RunStore, identity: Mapping[str, Any], accept_changes: bool | None) -> list[str]:
    """Return the differences from the stored identity if they are accepted; raise ConfigInvalid if they are not."""
    return compare_identities(store.path, store.get_fact(IDENTITY_KEY), identity, accept_changes)


def compare_identities(
    path: Path, stored: dict[str, Any] | None, identity: Mapping[str, Any], accept_changes: bool | None
) -> list[str]:
    """Do what `check_identity` does, for the run at `path` whose stored identity was read before."""
    if stored is None:
        return []
    if not (changes := list(diff_values(stored, dict(identity)))):
        return []
    is_acceptable = all(stored.get(key) == identity.get(key) for key in FIXED_KEYS)
    if accept_changes and is_acceptable:
        return changes
    lines = "".join(f"\n  {line}" for line in changes)
    hint = f"use another --name; or {RESUME_HINT}" if accept_changes is False and is_acceptable else NEW_RUN_HINT
    raise ConfigInvalid(f"{path} holds a run with another identity; differences:{lines}\n{hint}")


def move_aside(path: Path) -> Path:
    """Rename the run's directory to `NAME.old-N` and return the new path. Raises RunBusy if it is in use."""
    number = 1
    with watch_storage(path):
        while (new_path := path.with_name(f"{path.name}.old-{number}")).exists():
            number += 1
        lock_fd = acquire_lock(path)
        try:
            path.rename(new_path)
        finally:
            os.close(lock_fd)
    return new_path
