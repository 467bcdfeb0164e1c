"""The directory of a run's published weights: below the run or its shared directory, or in the host's memory.

Shared memory must not outlive the run. So every process that uses such a directory (the supervisor, the trainer) holds
a shared lock, which the kernel releases however the process ends. A directory without a lock belongs to a dead run, and
the next run to start removes it.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ramify.core.errors import ConfigInvalid, DeadlineExceeded
from ramify.core.files import flock_with_timeout

WEIGHTS_DIR = "weights"  # in the directory of a run
SHM_ROOT = Path("/dev/shm")
DIRECTORY_GLOB = "ramify-" + "[0-9a-f]" * 16
LOCK_SUFFIX = ".held"  # of the lock file beside a directory
LOCK_TIMEOUT = 60.0  # seconds for another process to remove what a dead run left in the directory
POLL_INTERVAL = 0.1  # seconds between two attempts to lock it


def get_weights_directory(run: Path, transport: str, shared: Path | None = None) -> Path:
    """Return the directory of a run's published weights.

    It is below `shared`, the directory that all nodes reach, or else below the run; or in the memory of the host, by a
    hash of the run's path.
    """
    if transport != "shm":
        return (shared or run) / WEIGHTS_DIR
    if not SHM_ROOT.is_dir():
        raise ConfigInvalid(f"this system has no {SHM_ROOT}; use 'disk'", key="weights.transport")
    return SHM_ROOT / f"ramify-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Hold a shared lock so that `remove_stale_directories` keeps the directory. Directories on disk need none.

    Raises DeadlineExceeded if another process is removing the directory for longer than LOCK_TIMEOUT.
    """
    if directory.parent != SHM_ROOT:
        yield
        return
    lock, deadline = _lock_path(directory), time.monotonic() + LOCK_TIMEOUT
    while True:
        with lock.open("w") as file:
            timeout = deadline - time.monotonic()
            is_locked = flock_with_timeout(file, fcntl.LOCK_SH, timeout=timeout, poll_interval=POLL_INTERVAL)
            if is_locked and _is_same_file(file.fileno(), lock):  # not removed meanwhile
                yield
                return
        if time.monotonic() >= deadline:
            problem = f"another process has been removing {directory} for {LOCK_TIMEOUT:g} s"
            raise DeadlineExceeded(f"{problem}; end the process that holds {lock}, then repeat the command")


def remove_stale_directories() -> list[Path]:
    """Remove the directories that dead runs left in shared memory; returns them."""
    names = {
        path.name.removesuffix(LOCK_SUFFIX)
        for suffix in ("", LOCK_SUFFIX)
        for path in SHM_ROOT.glob(DIRECTORY_GLOB + suffix)
    }
    return [SHM_ROOT / name for name in sorted(names) if _remove_if_unlocked(SHM_ROOT / name)]


def _remove_if_unlocked(directory: Path) -> bool:
    lock = _lock_path(directory)
    with contextlib.suppress(OSError), lock.open("w") as file:  # it is locked, or belongs to another user
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_same_file(file.fileno(), lock):
            shutil.rmtree(directory, ignore_errors=True)
            lock.unlink()
            return True
    return False


def _lock_path(directory: Path) -> Path:
    return directory.with_name(directory.name + LOCK_SUFFIX)


def _is_same_file(fd: int, path: Path) -> bool:
    """Return whether the open file is still the one at `path`."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False
