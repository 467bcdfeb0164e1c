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

SHARED = Path("/dev/shm")
NAMES = "ramify-" + "[0-9a-f]" * 16
HELD = ".held"  # how the name of the lock beside a directory ends


def weights_directory(run: Path, transport: str) -> Path:
    """Where a run's versions lie: below the run, or in the host's shared memory under a name that is the run's own."""
    if transport == "disk":
        return run / "weights"
    if not SHARED.is_dir():
        raise ConfigInvalid(f"weights.transport: this system has no {SHARED}; use 'disk'")
    return SHARED / f"ramify-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Nobody sweeps the directory away meanwhile. On a disk nobody does anyway."""
    if directory.parent != SHARED:
        yield
        return
    lock = directory.with_name(directory.name + HELD)
    while True:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            if _is(file.fileno(), lock):  # a sweep may have come first
                yield
                return


def sweep() -> list[Path]:
    """Remove what dead runs have left in shared memory; returns the directories."""
    names = {path.name.removesuffix(HELD) for end in ("", HELD) for path in SHARED.glob(NAMES + end)}
    return [SHARED / name for name in sorted(names) if _swept(SHARED / name)]


def _swept(directory: Path) -> bool:
    lock = directory.with_name(directory.name + HELD)
    with contextlib.suppress(OSError), lock.open("w") as file:  # it is held, or another user's
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(file.fileno(), lock):
            shutil.rmtree(directory, ignore_errors=True)
            lock.unlink()
            return True
    return False


def _is(handle: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False
