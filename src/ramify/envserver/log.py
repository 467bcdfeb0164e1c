"""One log file for a server and all its workers: every line once, with the time and who wrote it."""

import asyncio
import contextlib
import os
from collections import deque
from datetime import datetime
from pathlib import Path

from ramify.errors import StorageFailed

MAX_LINE_BYTES = 1 << 16  # bytes of a line; a longer one is broken
TAIL_LINES = 20  # lines of each worker that a failure may show


class EnvServerLog:
    """An open log file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", errors="replace", buffering=1)
        except OSError as error:
            raise StorageFailed(f"the log {path} cannot be written: {error.strerror}") from error

    def write(self, origin: str, line: str) -> None:
        """Add one line; a disk that is full costs lines, not the server."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._file.write(f"{datetime.now().isoformat(timespec='milliseconds')} {origin} {line}\n")

    def log_event(self, text: str) -> None:
        """Add what the broker has to say."""
        for line in text.splitlines():
            self.write("broker", line)

    def close(self) -> None:
        """No more lines."""
        self._file.close()


class WorkerOutput(asyncio.Protocol):
    """What a worker and its children print, line by line into the log."""

    def __init__(self, log: EnvServerLog, origin: str) -> None:
        self._log, self._origin, self._partial_line = log, origin, b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.closed = asyncio.Event()

    @classmethod
    async def open(cls, log: EnvServerLog, origin: str) -> tuple["WorkerOutput", int]:
        """A reader, and the descriptor to write to."""
        reading, writing = os.pipe()
        pipe = os.fdopen(reading, "rb", 0)
        _, output = await asyncio.get_running_loop().connect_read_pipe(lambda: cls(log, origin), pipe)
        return output, writing

    def data_received(self, data: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._write_line(line)
        while len(self._partial_line) > MAX_LINE_BYTES:
            self._write_line(self._partial_line[:MAX_LINE_BYTES])
            self._partial_line = self._partial_line[MAX_LINE_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._partial_line:
            self._write_line(self._partial_line)
        self.closed.set()

    def _write_line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self.tail.append(text)
        self._log.write(self._origin, text)
