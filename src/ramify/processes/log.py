"""The log file of a child process."""

import contextlib
from collections import deque
from pathlib import Path
from typing import IO

FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2
TAIL_LINES = 30  # lines of the log that a failure shows


class ProcessLog:
    """A file with the output of a process. Only what was written since the last `open` is read."""

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path, self._append = path, append
        self._offset = 0

    def open(self) -> IO[bytes]:
        """Open the file for the output of a process that is about to start."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab" if self._append else "wb")
        self._offset = file.tell()
        return file

    def tail(self, num_lines: int | None = TAIL_LINES) -> str:
        """Return the last lines, or all lines with None."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self._offset)
            return b"".join(deque(file, num_lines)).decode(errors="replace").strip() or "(nothing)"
        return "(no log)"

    def release_space(self, size: int) -> bool:
        """Release the disk space of the first `size` bytes, which then read as zeros; the size of the file stays.

        A process may append meanwhile. Return False if the file system cannot do this, and keeps the space.
        """
        import ctypes  # most processes do not need it

        libc = ctypes.CDLL(None, use_errno=True)
        with contextlib.suppress(OSError), self.path.open("r+b") as file:
            mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
            return libc.fallocate(file.fileno(), mode, ctypes.c_longlong(0), ctypes.c_longlong(size)) == 0
        return False

    def describe_tail(self) -> str:
        """Return the last lines with a heading, for an error message."""
        return f"last lines of {self.path}:\n{self.tail()}"
