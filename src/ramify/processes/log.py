"""The log file of a child process."""

import contextlib
from collections import deque
from pathlib import Path
from typing import IO

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

    def describe_tail(self) -> str:
        """Return the last lines with a heading, for an error message."""
        return f"last lines of {self.path}:\n{self.tail()}"
