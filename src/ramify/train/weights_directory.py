"""Where a run's published weights lie: below the run, or in the host's shared memory, which must not outlive the run.

A directory in shared memory is held by whoever works with it (the supervisor, the trainer) through a lock that the
kernel takes back however its holder dies. What nobody holds is of a run that is dead: whoever starts sweeps it away.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ramify.errors import ConfigInvalid

SHM_ROOT = Path("/dev/shm")
DIRECTORY_GLOB = "ramify-" + "[0-9a-f]" * 16
LOCK_SUFFIX = ".held"  # how the name of the lock beside a directory ends


def get_weights_directory(run: Path, transport: str) -> Path:
    """Where a run's versions lie: below the run, or in the host's shared memory under a name that is the run's own."""
    if transport == "disk":
        return run / "weights"
    if not SHM_ROOT.is_dir():
        raise ConfigInvalid(f"weights.transport: this system has no {SHM_ROOT}; use 'disk'")
    return SHM_ROOT / f"ramify-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Nobody sweeps the directory away meanwhile. On a disk nobody does anyway."""
    if directory.parent != SHM_ROOT:
        yield
        return
    lock = directory.with_name(directory.name + LOCK_SUFFIX)
    while True:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            if _is_same_file(file.fileno(), lock):  # a sweep may have come first
                yield
                return


def remove_stale_directories() -> list[Path]:
    """Remove what dead runs have left in shared memory; returns the directories."""
    names = {
        path.name.removesuffix(LOCK_SUFFIX) for end in ("", LOCK_SUFFIX) for path in SHM_ROOT.glob(DIRECTORY_GLOB + end)
    }
    return [SHM_ROOT / name for name in sorted(names) if _remove_if_unlocked(SHM_ROOT / name)]


def _remove_if_unlocked(directory: Path) -> bool:
    lock = directory.with_name(directory.name + LOCK_SUFFIX)
    with contextlib.suppress(OSError), lock.open("w") as file:  # it is held, or another user's
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_same_file(file.fileno(), lock):
            shutil.rmtree(directory, ignore_errors=True)
            lock.unlink()
            return True
    return False


def _is_same_file(fd: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False
