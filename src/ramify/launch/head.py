"""Which head continues a run that has a shared directory.

| run directory on this machine | history on shared storage | what happens |
|---|---|---|
| belongs to the newest head | | it continues in its term |
| none, or a run that had no shared directory | none | this machine becomes the first head |
| none, or belongs to an earlier head | exists | the next term is claimed, and the run directory is restored |

A claimed term ends the one before it: if the old head still runs, it can commit nothing more and exits. What it had
not committed is sampled and trained again.

Other nodes cannot see the run directory, which is on the disk of the head. So checkpoints, weights, images and token
stats are in the shared directory, and the run directory has links to them.
"""

import contextlib
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ramify.core.errors import ConfigInvalid, ProcessReplaced
from ramify.core.files import fsync_path
from ramify.core.watchdog import watch_storage
from ramify.orchestrate.run_config import RunConfig
from ramify.processes.child import KILL_TIMEOUT, STOP_TIMEOUT
from ramify.run.fencing.head_log import DirectoryStore, HeadLog, LogPosition
from ramify.run.fencing.token import FencingToken
from ramify.run.store import RunStore, storage_call, wrap_storage_errors
from ramify.run.store.change_tracking import HeadState, read_head_state
from ramify.run.store.head_replication import LogEntry, restore_run, start_replication
from ramify.run.store.image_store import MEDIA_DIR
from ramify.run.store.index import DATABASE_NAME
from ramify.run.store.ledger import Ledger
from ramify.run.store.run_directory import IDENTITY_KEY, compare_identities, move_aside, retry_while_busy
from ramify.run.store.run_log import RunLog
from ramify.run.store.run_store import acquire_lock
from ramify.train.checkpoint_manifest import CHECKPOINTS_DIR
from ramify.train.token_stats import TOKEN_STATS_DIR
from ramify.train.weights_directory import WEIGHTS_DIR

SHARED_SUBDIRECTORIES = (CHECKPOINTS_DIR, WEIGHTS_DIR, MEDIA_DIR, TOKEN_STATS_DIR)


def check_shared_parent(directory: Path) -> None:
    """Raise ConfigInvalid if not even the parent of `cluster.shared_directory` exists: its storage is not mounted."""
    parent = directory.absolute().parent
    with watch_storage(parent):
        is_mounted = parent.is_dir()
    if not is_mounted:
        problem = f"{directory} cannot be created, because {parent} is not a directory on this machine"
        advice = "mount the shared file system, or create that directory on it"
        raise ConfigInvalid(f"cluster.shared_directory: {problem}; {advice}")


def link_shared_directory(run: Path, shared: Path) -> None:
    """Create the subdirectories of `shared`, and links to them in the run directory.

    Raises ConfigInvalid if the run directory has such files of its own.
    """
    with storage_call(shared):
        run.mkdir(parents=True, exist_ok=True)
        for name in SHARED_SUBDIRECTORIES:
            target, link = shared.absolute() / name, run / name
            target.mkdir(parents=True, exist_ok=True)
            _replace_with_symlink(link, target)


def _replace_with_symlink(link: Path, target: Path) -> None:
    if link.is_symlink():
        if link.readlink() == target:
            return
        link.unlink()
    elif link.is_dir():
        if any(link.iterdir()):
            problem = "is not in the run's shared directory (cluster.shared_directory)"
            raise ConfigInvalid(f"{link} {problem}: move its contents to {target}, and repeat the command")
        link.rmdir()
    link.symlink_to(target, target_is_directory=True)


def move_shared_aside(run: Path, shared: Path) -> Path | None:
    """Move the run directory aside as `--fresh` does, and rename its part of the shared directory to `NAME.old-N`.

    Return the new path of the run directory; None if there was none.
    """
    with storage_call(shared):
        old_run = move_aside(run) if run.exists() else None
        for name in SHARED_SUBDIRECTORIES:
            number, directory = 1, shared.absolute() / name
            while (old_directory := directory.with_name(f"{name}.old-{number}")).exists():
                number += 1
            if not directory.is_dir() or not any(directory.iterdir()):
                continue
            directory.rename(old_directory)
            if old_run is not None and (link := old_run / name).is_symlink():
                link.unlink()
                link.symlink_to(old_directory, target_is_directory=True)
    return old_run


def prepare_head(
    config: RunConfig,
    *,
    fresh: bool = False,
    accept_changes: bool | None = None,
    print_line: Callable[[str], None] = print,
) -> int:
    """Bring the run directory up to date with the newest head, and link it to the shared directory.

    Return the term of this head. `fresh` begins the run again. Raises ConfigInvalid if the shared storage is
    missing, or if its history belongs to another run, unless `accept_changes`; ProcessReplaced if another head takes
    over at the same time.
    """
    run, shared = config.path, config.shared_path
    assert shared is not None
    with wrap_storage_errors(shared):
        check_shared_parent(shared.parent)
        if run.exists():
            # a process of a killed supervisor that is still ending might create one more entry
            os.close(retry_while_busy(partial(acquire_lock, run), STOP_TIMEOUT + KILL_TIMEOUT))
        log, state = HeadLog(DirectoryStore(shared)), read_local_state(run)
        if fresh:
            token, _ = log.claim_term(keep_history=False)
            move_shared_aside(run, shared)
            _begin_history(run, token.term)
        elif state is not None and _is_newest(log, state):
            token = FencingToken(state.term)
        else:
            has_history, identity = _read_history(log)
            if has_history:
                compare_identities(shared, identity, config.identity, accept_changes)
            elif state is None:  # raises if the run has checkpoints of its own
                link_shared_directory(run, shared)
            token, _ = log.claim_term()
            old_run = None
            if has_history and run.exists():
                old_run = _move_older_head(run)
            elif state is not None:  # a start with `fresh` was interrupted, or a head before its first entry
                old_run = move_shared_aside(run, shared)
            step = _restore_run(run, shared, token.term) if has_history else _begin_history(run, token.term)
            moved = f"; the directory of an older head is {old_run} now" if old_run else ""
            if token.term:
                print_line(f"this head begins term {token.term} of the run, after step {step}{moved}")
        link_shared_directory(run, shared)
        return token.term


def read_local_state(run: Path) -> HeadState | None:
    """Return the state of the head whose run directory this is; None if it is none."""
    with watch_storage(run):
        if not (run / DATABASE_NAME).is_file():
            return None
        with contextlib.closing(sqlite3.connect(run / DATABASE_NAME)) as connection:
            return read_head_state(connection)


def check_newest_head(run: Path) -> None:
    """Raise ProcessReplaced if this is the run directory of a head whose run was continued by another one."""
    state = read_local_state(run)
    if state is not None:
        checkpoints = run / CHECKPOINTS_DIR
        with storage_call(checkpoints):
            shared = checkpoints.resolve().parent
            is_newest = _is_newest(HeadLog(DirectoryStore(shared)), state)
        if not is_newest:
            raise ProcessReplaced(
                f"{run} belongs to an earlier head: another machine has continued the run; work there"
            )


def _is_newest(log: HeadLog, state: HeadState) -> bool:
    """Return whether the head may continue: its term is the newest, and every entry of it is its own."""
    if log.find_newest_term() != state.term:
        return False
    data = log.read_entry(LogPosition(state.term, state.next_entry))
    if data is not None and hashlib.sha256(data).hexdigest() == state.pending_digest:
        data = log.read_entry(LogPosition(state.term, state.next_entry + 1))
    return data is None


def _read_history(log: HeadLog) -> tuple[bool, dict[str, Any] | None]:
    """Return whether the log has entries, and the identity of the run that they belong to."""
    has_history, identity = False, None
    for position, data in log.iter_entries():
        has_history = True
        if (facts := LogEntry.decode(data, position).changes.tables.get("facts")) is not None:
            values = {row[facts.columns.index("key")]: row[facts.columns.index("value")] for row in facts.rows}
            identity = msgspec.msgpack.decode(values[IDENTITY_KEY]) if IDENTITY_KEY in values else identity
    return has_history, identity


def _begin_history(run: Path, term: int) -> int:
    """Start the log of a run that has none, but may have run without one; return the last committed step."""
    with RunStore.open(run) as store:
        start_replication(store, term)
        ledger = Ledger.open(store)
        ledger.begin_term(term)
        return ledger.progress().committed


def _restore_run(run: Path, shared: Path, term: int) -> int:
    """Restore the run directory from the history; return the last committed step."""
    partial_path = run.with_name(f".{run.name}.restoring")
    shutil.rmtree(partial_path, ignore_errors=True)
    restore_run(DirectoryStore(shared), partial_path, term)
    with RunStore.open(partial_path) as store:
        ledger = Ledger.open(store)
        ledger.begin_term(term)
        step = ledger.progress().committed
        RunLog(store).log_event("head_replaced", term=term, committed=step)
    partial_path.rename(run)
    fsync_path(run.parent)
    return step


def _move_older_head(run: Path) -> Path:
    """Move the directory of an older head aside. It keeps no links to the shared directory, which others use now."""
    old_run = move_aside(run)
    for name in SHARED_SUBDIRECTORIES:
        if (old_run / name).is_symlink():
            (old_run / name).unlink()
    return old_run
