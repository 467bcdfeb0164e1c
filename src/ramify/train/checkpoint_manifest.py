"""The manifest of a checkpoint, `checkpoint.json`: what was saved, and checksums of every file. Needs no torch.

Each rank computes the checksums of the files that it wrote. The first rank collects them and writes the manifest last,
before the checkpoint gets its final name. Before a checkpoint is loaded, the manifest and every file are verified.

The checksums of a file are computed in pieces by several threads, and ranks that load together share the pieces: a
checkpoint holds twelve bytes per trained weight, so one thread would take longer than the disk. The checksum is a CRC,
as for published weights: it detects damage, not an attacker, who could write the manifest as well.
"""

import contextlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import CheckpointRefused
from ramify.files import write_and_fsync

MANIFEST_FILE = "checkpoint.json"  # the last file to be written
PIECE_BYTES = 16 << 20  # covered by one checksum
READ_BYTES = 1 << 20  # read at once
MAX_THREADS = 8
_STEP_PATTERN = re.compile(r"step_(\d{6,})")


class FileRecord(msgspec.Struct, frozen=True):
    """The expected size and checksums of a file."""

    bytes: int
    crc32: list[str]
    """One for each piece of PIECE_BYTES, in hexadecimal."""


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `checkpoint.json`. Manifests from before checksums have neither `files` nor `checksum`."""

    step: int
    optimizer: str
    note: dict[str, Any]
    """Data of the run for when it is resumed."""
    files: dict[str, FileRecord] | None = None
    checksum: str | None = None
    """CRC-32 of the manifest itself, without this field."""

    @classmethod
    def read(cls, directory: Path) -> "CheckpointManifest":
        """Read and verify the manifest of a checkpoint. Raises CheckpointRefused."""
        path = directory / MANIFEST_FILE
        try:
            with refuse_unreadable(path):
                manifest = msgspec.json.decode(path.read_bytes(), type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointRefused(f"{path} is damaged: it is not the manifest of a checkpoint ({error})") from error
        if (manifest.files is None) != (manifest.checksum is None):
            raise CheckpointRefused(f"{path} is damaged: it needs both files and checksum, or neither")
        if manifest.checksum is not None and manifest.checksum != manifest._compute_checksum():
            expected = f"its content has checksum {manifest._compute_checksum()}, expected {manifest.checksum}"
            raise CheckpointRefused(f"{path} is damaged: {expected}")
        return manifest

    def write(self, directory: Path) -> None:
        """Write the manifest, with its checksum, into `directory`; it is on disk when this returns."""
        complete = msgspec.structs.replace(self, checksum=self._compute_checksum())
        write_and_fsync(directory / MANIFEST_FILE, msgspec.json.encode(complete))

    def _compute_checksum(self) -> str:
        content = msgspec.json.encode(msgspec.structs.replace(self, checksum=None), order="deterministic")
        return f"{zlib.crc32(content):08x}"


@contextlib.contextmanager
def refuse_unreadable(path: Path) -> Iterator[None]:
    """Raise CheckpointRefused if the file of a checkpoint cannot be read inside the block."""
    try:
        yield
    except OSError as error:
        raise CheckpointRefused(f"{path} cannot be read: {error.strerror or error}") from error


def checksum_files(paths: Iterable[Path]) -> dict[str, FileRecord]:
    """Compute the sizes and checksums of these files, by name. Raises OSError."""
    with _make_thread_pool() as pool:
        records: dict[str, FileRecord] = {}
        for path in paths:
            size = path.stat().st_size
            sums = pool.map(lambda index, path=path: _checksum_piece(path, index), range(_count_pieces(size)))
            records[path.name] = FileRecord(size, list(sums))
        return records


def verify_checkpoint(directory: Path, *, rank: int = 0, world_size: int = 1) -> CheckpointManifest:
    """Verify the manifest, the sizes of all files, and every `ranks`-th piece from `rank` on.

    Raises CheckpointRefused.
    """
    manifest = CheckpointManifest.read(directory)
    pieces = list(_iter_pieces(directory, manifest.files or {}))[rank::world_size]
    with _make_thread_pool() as pool:
        list(pool.map(lambda piece: _verify_piece(*piece), pieces))
    return manifest


def get_step_directory(directory: Path, step: int) -> Path:
    """Return the path of a step's checkpoint in the directory of all checkpoints."""
    return directory / f"step_{step:06}"


def list_saved_steps(directory: Path) -> list[int]:
    """Return the steps whose checkpoints have a manifest, in rising order. They may be damaged."""
    return _parse_steps(path.parent for path in directory.glob(f"step_*/{MANIFEST_FILE}"))


def list_completed_steps(directory: Path) -> list[int]:
    """Return the steps whose checkpoints were completed, in rising order, even if files are missing now."""
    return _parse_steps(directory.glob("step_*"))


def find_intact_step(directory: Path, before: int) -> int | None:
    """Return the newest step below `before` whose checkpoint passes verification; None if there is none.

    A checkpoint without checksums cannot be verified and does not count.
    """
    for step in reversed([step for step in list_saved_steps(directory) if step < before]):
        try:
            if verify_checkpoint(get_step_directory(directory, step)).files is not None:
                return step
        except CheckpointRefused:
            continue
    return None


def _parse_steps(paths: Iterable[Path]) -> list[int]:
    matches = (_STEP_PATTERN.fullmatch(path.name) for path in paths)
    return sorted(int(match[1]) for match in matches if match)


def _iter_pieces(directory: Path, files: Mapping[str, FileRecord]) -> Iterator[tuple[Path, int, str]]:
    """Check names and sizes, and yield path, index and expected checksum of each piece."""
    for name, record in files.items():
        path = directory / name
        with refuse_unreadable(path):
            size = path.stat().st_size
        if size != record.bytes:
            raise CheckpointRefused(f"{path} is damaged: it has {size} bytes, expected {record.bytes}")
        if len(record.crc32) != _count_pieces(size):
            raise CheckpointRefused(f"{path} is damaged: {len(record.crc32)} checksums for {size} bytes")
        yield from ((path, index, expected) for index, expected in enumerate(record.crc32))


def _verify_piece(path: Path, index: int, expected: str) -> None:
    with refuse_unreadable(path):
        actual = _checksum_piece(path, index)
    if actual != expected:
        where = f"the {PIECE_BYTES >> 20} MiB from byte {index * PIECE_BYTES} on"
        raise CheckpointRefused(f"{path} is damaged: {where} have checksum {actual}, expected {expected}")


def _checksum_piece(path: Path, index: int) -> str:
    value, buffer = 0, memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(index * PIECE_BYTES)
        remaining = PIECE_BYTES
        while remaining and (size := file.readinto(buffer[:remaining])):
            value = zlib.crc32(buffer[:size], value)
            remaining -= size
    return f"{value:08x}"


def _count_pieces(size: int) -> int:
    return -(-size // PIECE_BYTES)


def _make_thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="checksum")
