"""Create-once storage in a directory that all machines share.

A file is written in full under a name of its own, then linked to its final name: `link` fails if that name exists, also
on network file systems, where opening a file exclusively and then writing to it could leave half of it behind. If the
answer to `link` was lost, the number of links of the own file tells whether it was made.
"""

import os
from pathlib import Path
from uuid import uuid4

from ramify.core.files import fsync_path, mkdir_and_fsync, read_bytes, write_and_fsync
from ramify.core.watchdog import watch_storage


class DirectoryStore:
    """A `CreateOnceStore` below `directory`. Names may contain slashes. Methods raise OSError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def create(self, name: str, data: bytes) -> bool:
        """Create `name` with all of `data`, durably; return False if it exists, without changing it.

        A name that exists is on disk, too, when this returns: a creation that failed halfway may have made it.
        """
        path = self.directory / name
        mkdir_and_fsync(path.parent)
        partial_path = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            write_and_fsync(partial_path, data)
            try:
                with watch_storage(path):
                    os.link(partial_path, path)
            except OSError:
                if partial_path.stat().st_nlink != 2:
                    if not path.exists():
                        raise  # another failure than an existing name
                    fsync_path(path)
                    self._fsync_directories(path)
                    return False
            self._fsync_directories(path)
            return True
        finally:
            with watch_storage(path):
                partial_path.unlink(missing_ok=True)

    def _fsync_directories(self, path: Path) -> None:
        """Bring the names of a file and of the directories above it to disk, up to this store."""
        for parent in path.parents:
            fsync_path(parent)
            if parent == self.directory:
                return

    def read(self, name: str) -> bytes | None:
        """Return the data of `name`; None if it does not exist."""
        try:
            return read_bytes(self.directory / name)
        except FileNotFoundError:
            return None
