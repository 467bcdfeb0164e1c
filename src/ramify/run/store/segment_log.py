"""An append-only log of compressed frames in segment files: `length u32 | crc32 u32 | zstd`.

The valid length of a segment is stored in the index, in the transaction after the fsync. Bytes beyond it are truncated
before the next append, so torn writes need no detection.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import zstandard

from ramify.core.errors import DataCorrupt
from ramify.core.files import fsync_path
from ramify.core.watchdog import watch_storage
from ramify.run.store.index import FrameLocation

FRAME_HEADER = struct.Struct("<II")
MAX_SEGMENT_BYTES = 64 * 2**20  # small enough to copy, large enough for few files
ZSTD_LEVEL = 3


class SegmentLog:
    """The segment files of a run in `folder`.

    To add data: `append` it, then `sync`, then store the location in the index. `segment_number` and `segment_length`
    describe the segment that is appended to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.segment_number, self.segment_length = 0, 0
        self._fd: int | None = None
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)

    def open(self, committed_lengths: dict[int, int]) -> None:
        """Open the log for appending; truncate each segment to its committed length.

        Raises DataCorrupt if a segment is missing or shorter than committed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob("*.seg")):
            self._truncate_tail(path, committed_lengths.get(int(path.stem), 0))
        for number, length in committed_lengths.items():
            if length and not self.get_path(number).exists():
                raise DataCorrupt(f"{self.get_path(number)} is missing, but the run's index points into it")
        self.segment_number = max(committed_lengths, default=0)
        self._open_current(committed_lengths.get(self.segment_number, 0))

    def append(self, data: bytes) -> FrameLocation:
        """Write one frame and return its location. It is not durable before `sync`."""
        if self._fd is None:
            raise DataCorrupt(f"{self.folder} is not open for writing")
        compressed = self._compressor.compress(data)
        frame = FRAME_HEADER.pack(len(compressed), zlib.crc32(compressed)) + compressed
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
        """Make everything that was appended durable."""
        if self._fd is not None:
            os.fsync(self._fd)

    def truncate_to(self, number: int, length: int) -> None:
        """Remove what was appended after byte `length` of segment `number`."""
        self.close()
        for path in self.folder.glob("*.seg"):
            if int(path.stem) > number:
                path.unlink()
        self.segment_number = number
        if self.get_path(number).exists():
            os.truncate(self.get_path(number), length)
        self._open_current(length)

    def read(self, location: FrameLocation) -> bytes:
        """Return the data of the frame at `location`. Raises DataCorrupt if the frame is damaged."""
        path = self.get_path(location.segment)
        try:
            with watch_storage(path), path.open("rb") as file:
                file.seek(location.start)
                frame = file.read(location.stop - location.start)
        except OSError as error:
            raise DataCorrupt(f"{path} cannot be read: {error.strerror}") from error
        length, checksum = FRAME_HEADER.unpack_from(frame) if len(frame) >= FRAME_HEADER.size else (-1, 0)
        compressed = frame[FRAME_HEADER.size :]
        if len(compressed) != length or zlib.crc32(compressed) != checksum:
            raise DataCorrupt(
                f"{path}: bytes [{location.start}, {location.stop}) are not the frame that was written there"
            )
        return zstandard.ZstdDecompressor().decompress(compressed)

    def verify(self, committed_lengths: dict[int, int]) -> Iterator[tuple[FrameLocation, str]]:
        """Yield the location of every frame, replaced ones included, with its problem; "" if it is intact."""
        for number, length in sorted(committed_lengths.items()):
            try:
                data = self.get_path(number).read_bytes()
            except OSError as error:
                yield FrameLocation(number, 0, length), f"{self.get_path(number)} cannot be read: {error.strerror}"
                continue
            yield from self._verify_segment(number, data, length)

    def _verify_segment(self, number: int, data: bytes, length: int) -> Iterator[tuple[FrameLocation, str]]:
        path, start = self.get_path(number), 0
        while start < length:
            has_header = start + FRAME_HEADER.size <= len(data)
            size, checksum = FRAME_HEADER.unpack_from(data, start) if has_header else (0, 0)
            stop = start + FRAME_HEADER.size + size
            location = FrameLocation(number, start, stop)
            if not size or stop > min(length, len(data)):
                yield location, f"{path}: the frame at byte {start} of {length} is cut short or has no valid size"
                return
            matches = zlib.crc32(data[start + FRAME_HEADER.size : stop]) == checksum
            yield location, "" if matches else f"{path}: bytes [{start}, {stop}) do not match their checksum"
            start = stop

    def close(self) -> None:
        """Close the segment that is appended to."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open_current(self, length: int) -> None:
        path = self.get_path(self.segment_number)
        is_new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.segment_length = length
        if is_new:
            fsync_path(self.folder)

    def _truncate_tail(self, path: Path, length: int) -> None:
        size = path.stat().st_size
        if size < length:
            raise DataCorrupt(
                f"{path} has {size} bytes, but the run's index expects {length}: the disk lost synced data; "
                f"restore the run from a copy, or start a new run with --fresh"
            )
        if size > length:
            os.truncate(path, length)

    def get_path(self, number: int) -> Path:
        """Return the file of a segment."""
        return self.folder / f"{number:06d}.seg"


def _write_all(fd: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]
