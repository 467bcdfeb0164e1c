"""Records inside the output of a program. A record is one line: the random marker of the program, then words."""

import contextlib
from collections.abc import Callable

RECORD_LIMIT = 200  # bytes of a record at most


class RecordFilter:
    """Removes the records from a stream: `write` gets the rest, `handle` gets each record as a list of words."""

    def __init__(self, marker: str, write: Callable[[bytes], None], handle: Callable[[list[str]], None]) -> None:
        self._start = f"\x1e{marker} ".encode()
        self._write, self._handle = write, handle
        self._pending: bytes = b""

    def write(self, data: bytes) -> None:
        """Take a part of the stream."""
        data = self._pending + data
        self._pending = b""
        while data:
            position = data.find(self._start)
            if position < 0:
                keep = _count_overlap(data, self._start)
                self._write_some(data[: len(data) - keep])
                self._pending = data[len(data) - keep :]
                return
            self._write_some(data[:position])
            data = data[position:]
            end = data.find(b"\n", len(self._start))
            if end < 0 and len(data) < RECORD_LIMIT:
                self._pending = data
                return
            if end >= 0:
                with contextlib.suppress(ValueError, IndexError):  # a program may write anything
                    self._handle(data[len(self._start) : end].decode("ascii", "replace").split())
                data = data[end + 1 :]
            else:  # too long for a record
                self._write_some(data[:1])
                data = data[1:]

    def flush(self) -> None:
        """Pass on what may have been the start of a record: the stream has ended."""
        self._write_some(self._pending)
        self._pending = b""

    def _write_some(self, data: bytes) -> None:
        if data:
            self._write(data)


def _count_overlap(data: bytes, start: bytes) -> int:
    """Return how many bytes at the end of `data` may be the start of a record."""
    return next((size for size in range(min(len(start) - 1, len(data)), 0, -1) if data.endswith(start[:size])), 0)
