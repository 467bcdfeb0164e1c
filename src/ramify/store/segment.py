"""Append-only files of compressed frames: `length u32 | crc32 u32 | zstd`.

A segment is only ever appended to or cut. How much of it counts is not for the file to say: the index knows, because
it was told in the transaction that followed the sync. So a torn tail needs no clever reading; everything behind the
known length is cut before the next frame is written.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import zstandard

from ramify.errors import TraceCorrupt
from ramify.store.rows import Place

HEAD = struct.Struct("<II")
FULL = 64 * 2**20  # bytes after which a new segment is begun: small enough to copy, large enough to be few
LEVEL = 3


class Segments:
    """The segments of a run: `append`, then `sync`, then the place may be told to the index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number, self.length = 0, 0
        self._file: int | None = None
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)

    def open(self, known: dict[int, int]) -> Self:
        """Cut every segment to its known length and go on behind the last one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob("*.seg")):
            self._cut(path, known.get(int(path.stem), 0))
        missing = [self._path(number) for number, length in known.items() if length and not self._path(number).exists()]
        if missing:
            raise TraceCorrupt(f"{missing[0]} is gone, but the run's index points into it")
        self.number = max(known, default=0)
        self._begin(known.get(self.number, 0))
        return self

    def append(self, data: bytes) -> Place:
        """Write one frame; nothing is safe before `sync`."""
        if self._file is None:
            raise TraceCorrupt(f"{self.folder} is not open for writing")
        packed = self._compressor.compress(data)
        frame = HEAD.pack(len(packed), zlib.crc32(packed)) + packed
        if self.length and self.length + len(frame) > FULL:
            self.sync()
            self.close()
            self.number += 1
            self._begin(0)
        start = self.length
        _write_all(self._file, frame)
        self.length += len(frame)
        return Place(self.number, start, self.length)

    def sync(self) -> None:
        """Return when every byte written so far would survive a power cut."""
        if self._file is not None:
            os.fsync(self._file)

    def retreat(self, number: int, length: int) -> None:
        """Forget what was written after this point: the index will never know it."""
        self.close()
        for path in self.folder.glob("*.seg"):
            if int(path.stem) > number:
                path.unlink()
        self.number = number
        if self._path(number).exists():
            os.truncate(self._path(number), length)
        self._begin(length)

    def read(self, place: Place) -> bytes:
        """The frame at `place`. Raises TraceCorrupt if it is not the one that was written."""
        path = self._path(place.segment)
        try:
            with path.open("rb") as file:
                file.seek(place.start)
                frame = file.read(place.stop - place.start)
        except OSError as error:
            raise TraceCorrupt(f"{path} cannot be read: {error.strerror}") from error
        length, checksum = HEAD.unpack_from(frame) if len(frame) >= HEAD.size else (-1, 0)
        packed = frame[HEAD.size :]
        if len(packed) != length or zlib.crc32(packed) != checksum:
            raise TraceCorrupt(f"{path}: bytes [{place.start}, {place.stop}) are not the frame that was written there")
        return zstandard.ZstdDecompressor().decompress(packed)

    def verify(self, known: dict[int, int]) -> Iterator[tuple[Place, str]]:
        """Yield the place of every frame, superseded ones included, with its problem; "" if it is intact."""
        for number, length in sorted(known.items()):
            try:
                data = self._path(number).read_bytes()
            except OSError as error:
                yield Place(number, 0, length), f"{self._path(number)} cannot be read: {error.strerror}"
                continue
            yield from self._verify(number, data, length)

    def _verify(self, number: int, data: bytes, length: int) -> Iterator[tuple[Place, str]]:
        start = 0
        while start < length:
            size, checksum = HEAD.unpack_from(data, start) if start + HEAD.size <= len(data) else (0, 0)
            stop = start + HEAD.size + size
            place = Place(number, start, stop)
            if not size or stop > min(length, len(data)):
                yield (
                    place,
                    f"{self._path(number)}: the frame at byte {start} of {length} is cut short or has no valid size",
                )
                return
            broken = zlib.crc32(data[start + HEAD.size : stop]) != checksum
            yield place, f"{self._path(number)}: bytes [{start}, {stop}) do not match their checksum" if broken else ""
            start = stop

    def close(self) -> None:
        """Close the segment that is written to."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self, length: int) -> None:
        fresh = not self._path(self.number).exists()
        self._file = os.open(self._path(self.number), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.length = length
        if fresh:
            sync_directory(self.folder)

    def _cut(self, path: Path, length: int) -> None:
        found = path.stat().st_size
        if found < length:
            raise TraceCorrupt(
                f"{path} has {found} bytes, but the run's index points to {length}: the disk lost what it had synced; "
                f"copy the run from elsewhere or start it --fresh"
            )
        if found > length:
            os.truncate(path, length)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.seg"


def sync_directory(folder: Path) -> None:
    """A new name in `folder` survives a power cut once this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
