"""The directory of a slot: temporary files of one process, on its node.

Its owner removes it when the process has ended. An owner that is killed cannot do so: an actor of Ray that was not
reachable, or a supervisor. Therefore the owner holds a lock in the directory, which the kernel releases however the
owner ends, and whoever creates the next slot on the node removes the directories without one.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from ramify.run.store import storage_call

PREFIX = "ramify-slot-"
LOCK_FILE = ".lock"


class SlotDirectory:
    """A new temporary directory at `path`; those of owners that were killed are removed first. Call `remove` once."""

    def __init__(self) -> None:
        temp_root = Path(tempfile.gettempdir())
        with storage_call(temp_root):
            _remove_abandoned(temp_root)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temp_root))
            new_lock = self.path / f"{LOCK_FILE}.new"
            self._lock_fd = os.open(new_lock, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            new_lock.rename(self.path / LOCK_FILE)  # nobody sees it without its lock

    def remove(self) -> None:
        """Remove the directory with all files."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def _remove_abandoned(temp_root: Path) -> None:
    for directory in temp_root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is new, locked, or belongs to another user
            fd = os.open(directory / LOCK_FILE, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(fd)
