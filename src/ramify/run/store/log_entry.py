"""One entry of the head log: what has changed in a run since the entry before it.

    entry: sha256 (32 bytes) | zstd(msgpack(LogEntry))

Rows are in the entry itself. Traces and other files are cut into parts of at most PART_BYTES, which are stored under
their digests before the entry is created; the entry names them. A run is restored by applying its entries in order.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import zstandard

from ramify.core.errors import StorageFailed
from ramify.run.fencing.head_log import CreateOnceStore, LogPosition
from ramify.run.store.change_tracking import TableChanges
from ramify.run.store.segment_log import ZSTD_LEVEL

PART_BYTES = 16 << 20
PARTS_DIR = "parts"  # in the shared directory
DIGEST_BYTES = 32


class FilePart(msgspec.Struct, frozen=True):
    """Bytes [start, start + length) of a file, whose path is relative to the run directory."""

    path: str
    start: int
    length: int
    digest: str  # SHA-256 of the bytes, and their name in the shared directory


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of the tables, and the parts of files that were added. No two entries have the same `id`."""

    changes: TableChanges
    parts: list[FilePart]
    id: str = msgspec.field(default_factory=lambda: uuid4().hex)

    def encode(self) -> bytes:
        """Return the entry as bytes, with a checksum."""
        data = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(msgspec.msgpack.encode(self))
        return hashlib.sha256(data).digest() + data

    @classmethod
    def decode(cls, data: bytes, position: LogPosition) -> "LogEntry":
        """Return the entry that was encoded. Raises StorageFailed if it is damaged."""
        content = data[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != data[:DIGEST_BYTES]:
            name = f"ledger/{position.term}/{position.number}"
            raise StorageFailed(f"{name} is damaged: its content does not match its checksum; restore it from a copy")
        return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(content), type=cls)


def store_parts(store: CreateOnceStore, run: Path, path: Path, start: int, stop: int) -> Iterator[FilePart]:
    """Store bytes [start, stop) of a file of the run, and yield the parts. Raises OSError."""
    with path.open("rb") as file:
        file.seek(start)
        while start < stop:
            data = file.read(min(PART_BYTES, stop - start))
            if not data:
                raise StorageFailed(f"{path} has {start} bytes, expected {stop}: the disk lost synced data")
            part = FilePart(str(path.relative_to(run)), start, len(data), hashlib.sha256(data).hexdigest())
            store.create(_get_part_name(part.digest), data)  # if it exists, it has the same bytes
            yield part
            start += len(data)


def restore_part(store: CreateOnceStore, run: Path, part: FilePart) -> None:
    """Write a part to its file in the run directory. Raises OSError, or StorageFailed if the part is damaged."""
    name = _get_part_name(part.digest)
    data = store.read(name)
    if data is None or hashlib.sha256(data).hexdigest() != part.digest:
        problem = "is missing" if data is None else "is damaged"
        raise StorageFailed(f"{name} {problem}, and {part.path} cannot be restored without it; restore it from a copy")
    path = run / part.path
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    with os.fdopen(fd, "wb") as file:
        file.truncate(part.start)  # a file that was replaced is longer
        file.seek(part.start)
        file.write(data)
        file.flush()
        os.fsync(fd)


def _get_part_name(digest: str) -> str:
    return f"{PARTS_DIR}/{digest[:2]}/{digest}"
