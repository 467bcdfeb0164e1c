"""The log file of a child process, which ends with the failure of the process as data.

A `ramify` command that is the child of another process prints its failure a second time, as JSON in one line. It comes
the same way as all its output, also from another node.
"""

import contextlib
import json
import os
import sys
from collections import deque
from pathlib import Path
from typing import IO

import msgspec

from ramify.core.errors import Failure, RamifyError
from ramify.core.watchdog import watch_storage

FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2
TAIL_LINES = 30  # lines of the log that a failure shows
FAILURE_VARIABLE = "RAMIFY_REPORT_FAILURE"  # set for child processes
FAILURE_PREFIX = "ramify-failure: "  # the line with the failure begins with it


def report_failure(error: RamifyError) -> None:
    """Print a failure for `ProcessLog.read_failure`, if this process is the child of another one of Ramify."""
    if FAILURE_VARIABLE in os.environ:
        failure = Failure(error.name, error.message, error.blame, error.retryable, details=error.details)
        print(f"{FAILURE_PREFIX}{json.dumps(msgspec.to_builtins(failure))}", file=sys.stderr, flush=True)


class ProcessLog:
    """A file with the output of a process. Only what was written since the last `open` is read."""

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path, self._append = path, append
        self._offset = 0

    def open(self) -> IO[bytes]:
        """Open the file for the output of a process that is about to start."""
        with watch_storage(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("ab" if self._append else "wb")
            self._offset = file.tell()
        return file

    def tail(self, num_lines: int | None = TAIL_LINES) -> str:
        """Return the last lines, or all lines with None."""
        with contextlib.suppress(OSError), watch_storage(self.path), self.path.open("rb") as file:
            file.seek(self._offset)
            lines = deque((line for line in file if not line.startswith(FAILURE_PREFIX.encode())), num_lines)
            return b"".join(lines).decode(errors="replace").strip() or "(nothing)"
        return "(no log)"

    def read_failure(self) -> RamifyError | None:
        """Return the failure that the process reported last; None if it reported none."""
        prefix, lines = FAILURE_PREFIX.encode(), deque[bytes](maxlen=1)
        with contextlib.suppress(OSError), watch_storage(self.path), self.path.open("rb") as file:
            file.seek(self._offset)
            lines.extend(line for line in file if line.startswith(prefix))
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # a process may be killed while it prints
            return msgspec.json.decode(lines[0].removeprefix(prefix), type=Failure).to_exception() if lines else None
        return None

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
