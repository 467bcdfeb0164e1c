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
from ramify.store.rollout_table import FrameLocation

FRAME_HEADER = struct.Struct("<II")
MAX_SEGMENT_BYTES = 64 * 2**20  # bytes after which a new segment is begun: small enough to copy, large enough to be few
ZSTD_LEVEL = 3


class SegmentLog:
    """The segments of a run: `append`, then `sync`, then the place may be told to the index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.segment_number, self.segment_length = 0, 0
        self._fd: int | None = None
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)

    def open(self, committed_lengths: dict[int, int]) -> Self:
        """Cut every segment to its known length and go on behind the last one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob("*.seg")):
            self._truncate_tail(path, committed_lengths.get(int(path.stem), 0))
        missing = [
            self._path(number)
            for number, length in committed_lengths.items()
            if length and not self._path(number).exists()
        ]
        if missing:
            raise TraceCorrupt(f"{missing[0]} is gone, but the run's index points into it")
        self.segment_number = max(committed_lengths, default=0)
        self._open_current(committed_lengths.get(self.segment_number, 0))
        return self

    def append(self, data: bytes) -> FrameLocation:
        """Write one frame; nothing is safe before `sync`."""
        if self._fd is None:
            raise TraceCorrupt(f"{self.folder} is not open for writing")
        packed = self._compressor.compress(data)
        frame = FRAME_HEADER.pack(len(packed), zlib.crc32(packed)) + packed
        if self.segment_length and self.segment_length + len(frame) > MAX_SEGMENT_BYTES:
            self.sync()
            self.close()
            self.segment_number += 1
            self._open_current(0)
        start = self.segment_length
        _write_all(self._fd, frame)
        self.segment_length += len(frame)
        return FrameLocation(self.segment_number, start, self.segment_length)

    def sync(self) -> None:
        """Return when every byte written so far would survive a power cut."""
        if self._fd is not None:
            os.fsync(self._fd)

    def truncate_to(self, number: int, length: int) -> None:
        """Forget what was written after this point: the index will never know it."""
        self.close()
        for path in self.folder.glob("*.seg"):
            if int(path.stem) > number:
                path.unlink()
        self.segment_number = number
        if self._path(number).exists():
            os.truncate(self._path(number), length)
        self._open_current(length)

    def read(self, location: FrameLocation) -> bytes:
        """The frame at `place`. Raises TraceCorrupt if it is not the one that was written."""
        path = self._path(location.segment)
        try:
            with path.open("rb") as file:
                file.seek(location.start)
                frame = file.read(location.stop - location.start)
        except OSError as error:
            raise TraceCorrupt(f"{path} cannot be read: {error.strerror}") from error
        length, checksum = FRAME_HEADER.unpack_from(frame) if len(frame) >= FRAME_HEADER.size else (-1, 0)
        packed = frame[FRAME_HEADER.size :]
        if len(packed) != length or zlib.crc32(packed) != checksum:
            raise TraceCorrupt(
                f"{path}: bytes [{location.start}, {location.stop}) are not the frame that was written there"
            )
        return zstandard.ZstdDecompressor().decompress(packed)

    def verify(self, committed_lengths: dict[int, int]) -> Iterator[tuple[FrameLocation, str]]:
        """Yield the place of every frame, superseded ones included, with its problem; "" if it is intact."""
        for number, length in sorted(committed_lengths.items()):
            try:
                data = self._path(number).read_bytes()
            except OSError as error:
                yield FrameLocation(number, 0, length), f"{self._path(number)} cannot be read: {error.strerror}"
                continue
            yield from self._verify_segment(number, data, length)

    def _verify_segment(self, number: int, data: bytes, length: int) -> Iterator[tuple[FrameLocation, str]]:
        start = 0
        while start < length:
            size, checksum = FRAME_HEADER.unpack_from(data, start) if start + FRAME_HEADER.size <= len(data) else (0, 0)
            stop = start + FRAME_HEADER.size + size
            place = FrameLocation(number, start, stop)
            if not size or stop > min(length, len(data)):
                yield (
                    place,
                    f"{self._path(number)}: the frame at byte {start} of {length} is cut short or has no valid size",
                )
                return
            broken = zlib.crc32(data[start + FRAME_HEADER.size : stop]) != checksum
            yield place, f"{self._path(number)}: bytes [{start}, {stop}) do not match their checksum" if broken else ""
            start = stop

    def close(self) -> None:
        """Close the segment that is written to."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open_current(self, length: int) -> None:
        fresh = not self._path(self.segment_number).exists()
        self._fd = os.open(self._path(self.segment_number), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.segment_length = length
        if fresh:
            fsync_directory(self.folder)

    def _truncate_tail(self, path: Path, length: int) -> None:
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


def fsync_directory(folder: Path) -> None:
    """A new name in `folder` survives a power cut once this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
