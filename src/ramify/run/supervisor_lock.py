"""The lock of a run. Its supervisor holds it from before the processes start until they have ended.

The lock file is beside the run directory, because `--fresh` renames the directory.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from ramify.core.errors import RunBusy, StorageFailed
from ramify.run.store import storage_call
from ramify.run.store.locks import describe_holders, find_writer, write_holder

LOCK_SUFFIX = "lock"  # of the file beside the run directory


class LockHolder(NamedTuple):
    """The process that holds the lock of a run."""

    pid: int  # 0 for a process in another container
    locked_at: float  # Unix seconds at which it locked the run, by its own clock


@contextlib.contextmanager
def lock_run(path: Path) -> Generator[None]:
    """Lock the run for one supervisor. Raises RunBusy if another one holds the lock."""
    with storage_call(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(_get_lock_file(path), os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(fd):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holders = describe_holders(fd)
            by = f", {holders}" if holders else ""
            advice = "wait for it or choose another --name"
            raise RunBusy(f"{path} is in use by another `ramify rl`{by}; {advice}") from None
        except OSError as error:
            raise StorageFailed(f"{path} cannot be locked: {error.strerror}; use a file system with locks") from error
        write_holder(fd)
        now = time.time()
        with contextlib.suppress(OSError):  # the file may be another user's
            os.utime(fd, (now, now))  # by the clock of this machine, not a file server's
        yield


def find_supervisor(path: Path) -> LockHolder | None:
    """Return the process on this machine that supervises the run; None if there is none."""
    file = _get_lock_file(path.absolute())
    pid = find_writer(file)
    try:
        return None if pid is None else LockHolder(pid, file.stat().st_mtime)
    except OSError:  # it was removed meanwhile
        return None


def _get_lock_file(path: Path) -> Path:
    return path.parent / f".{path.name}.{LOCK_SUFFIX}"
