"""The manifest of a checkpoint, `checkpoint.json`: what was saved, and checksums of every file. Needs no torch.

Each rank computes the checksums of the files that it wrote. The first rank collects them and writes the manifest last,
before the checkpoint gets its final name. Before a checkpoint is loaded, the manifest and every file are verified.

The checksums of a file are computed in pieces by several threads, and ranks that load together share the pieces: a
checkpoint holds twelve bytes per trained weight, so one thread would take longer than the disk. The checksum is a CRC,
as for published weights: it detects damage, not an attacker, who could write the manifest as well.
"""

import contextlib
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.core.async_calls import map_in_daemon_threads
from ramify.core.errors import CheckpointRefused, ConfigInvalid
from ramify.core.files import read_bytes, write_and_fsync
from ramify.core.watchdog import watch_storage
from ramify.model.weights_manifest import compute_part_crc32
from ramify.run.fencing.token import TOKEN_PATTERN, FencingToken
from ramify.run.store.run_directory import NEW_RUN_HINT
from ramify.train.config import OptimConfig

CHECKPOINTS_DIR = "checkpoints"  # in the directory of a run
MANIFEST_FILE = "checkpoint.json"  # the last file to be written
PIECE_BYTES = 16 << 20  # covered by one checksum
MAX_THREADS = 8
QUANTIZED_SUFFIX = "-8bit"  # of an optimizer whose moments have 8 bits
_NAME_PATTERN = re.compile(rf"step_(\d{{6,}})(?:-({TOKEN_PATTERN}))?")


class FileRecord(msgspec.Struct, frozen=True):
    """The expected size and checksums of a file."""

    bytes: int
    crc32: list[str]  # one for each piece of PIECE_BYTES, in hexadecimal


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `checkpoint.json`."""

    step: int
    optimizer: str
    note: dict[str, Any]  # data of the run for when it is resumed
    files: dict[str, FileRecord]
    checksum: str = ""  # CRC-32 of the manifest itself, without this field

    @classmethod
    def read(cls, directory: Path) -> "CheckpointManifest":
        """Read and verify the manifest of a checkpoint. Raises CheckpointRefused."""
        path = directory / MANIFEST_FILE
        try:
            with convert_read_errors(path):
                manifest = msgspec.json.decode(read_bytes(path), type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointRefused(f"{path} is damaged: it is not the manifest of a checkpoint ({error})") from error
        if manifest.checksum != manifest._compute_checksum():
            expected = f"its content has checksum {manifest._compute_checksum()}, expected {manifest.checksum}"
            raise CheckpointRefused(f"{path} is damaged: {expected}")
        return manifest

    def write(self, directory: Path) -> None:
        """Write the manifest, with its checksum, into `directory`; it is on disk when this returns."""
        complete = msgspec.structs.replace(self, checksum=self._compute_checksum())
        write_and_fsync(directory / MANIFEST_FILE, msgspec.json.encode(complete))

    def _compute_checksum(self) -> str:
        content = msgspec.json.encode(msgspec.structs.replace(self, checksum=""), order="deterministic")
        return f"{zlib.crc32(content):08x}"


@contextlib.contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into CheckpointRefused."""
    try:
        yield
    except OSError as error:
        raise CheckpointRefused(f"{path} cannot be read: {error.strerror or error}") from error


class SavedOptimizer(NamedTuple):
    """The optimizer that wrote a checkpoint, and the format of its moments."""

    type: str
    moments: str

    @classmethod
    def parse(cls, name: str) -> "SavedOptimizer":
        """Return the optimizer that a manifest names."""
        moments = "8bit" if name.endswith(QUANTIZED_SUFFIX) else "float32"
        return cls(name.removesuffix(QUANTIZED_SUFFIX), moments)

    @property
    def name(self) -> str:
        """The name in a manifest."""
        return f"{self.type}{QUANTIZED_SUFFIX}" if self.moments == "8bit" else self.type

    def check_matches(self, optim: OptimConfig) -> None:
        """Raise ConfigInvalid if a run with these settings cannot continue from the checkpoint."""
        if optim.type != self.type:
            key, expected, value = "type", repr(self.type), optim.type
        elif optim.moments not in (self.moments, "auto"):
            key, expected, value = "moments", f"{self.moments!r} or 'auto'", optim.moments
        else:
            return
        problem = f"expected {expected}, as in the run's checkpoints, got {value!r}; {NEW_RUN_HINT}"
        raise ConfigInvalid(problem, key=f"trainer.optim.{key}")


def find_saved_optimizer(directory: Path) -> SavedOptimizer | None:
    """Return the optimizer of the newest readable checkpoint of a run; None without one."""
    for path in reversed(list_checkpoints(directory)):
        with contextlib.suppress(CheckpointRefused):
            return SavedOptimizer.parse(CheckpointManifest.read(path).optimizer)
    return None


def checksum_files(paths: Iterable[Path]) -> dict[str, FileRecord]:
    """Compute the sizes and checksums of these files, by name. Raises OSError."""
    records: dict[str, FileRecord] = {}
    for path in paths:
        size, checksum = path.stat().st_size, partial(_checksum_piece, path)
        sums = map_in_daemon_threads(checksum, range(_count_pieces(size)), max_threads=MAX_THREADS)
        records[path.name] = FileRecord(size, sums)
    return records


def verify_checkpoint(directory: Path, *, rank: int = 0, world_size: int = 1) -> CheckpointManifest:
    """Verify the manifest, the sizes of all files, and every `ranks`-th piece from `rank` on.

    Raises CheckpointRefused.
    """
    manifest = CheckpointManifest.read(directory)
    pieces = list(_iter_pieces(directory, manifest.files))[rank::world_size]
    map_in_daemon_threads(lambda piece: _verify_piece(*piece), pieces, max_threads=MAX_THREADS)
    return manifest


def compute_manifest_digest(directory: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest, which a commit stores. Raises CheckpointRefused."""
    path = directory / MANIFEST_FILE
    with convert_read_errors(path):
        return hashlib.sha256(read_bytes(path)).hexdigest()


def get_step_directory(directory: Path, step: int, token: FencingToken | None = None) -> Path:
    """Return the path of a step's checkpoint in the directory of all checkpoints.

    `token` is the fencing token of the trainer that writes it. In a run without a ledger it is None, and the name has
    no token.
    """
    return directory / (f"step_{step:06}" if token is None else f"step_{step:06}-{token}")


def parse_checkpoint_name(name: str) -> tuple[int, FencingToken] | None:
    """Return step and token of a checkpoint's directory; the token is 0 if the name has none. None for other names."""
    match = _NAME_PATTERN.fullmatch(name)
    return (int(match[1]), FencingToken.parse(match[2] or "0")) if match else None


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints that were completed, by step and token, even if files are missing now."""
    with watch_storage(directory):
        names = {path: parse_checkpoint_name(path.name) for path in directory.glob("step_*")}
    return [path for _, path in sorted((name, path) for path, name in names.items() if name is not None)]


def find_committed_checkpoint(directory: Path, step: int, name: str = "") -> Path:
    """Return the checkpoint of a step: the one with the name that was committed, else the newest of the step."""
    if name:
        return directory / name
    paths = [path for path in list_checkpoints(directory) if get_checkpoint_step(path) == step]
    return paths[-1] if paths else get_step_directory(directory, step)


def list_saved_steps(directory: Path) -> list[int]:
    """Return the steps whose checkpoints have a manifest, in rising order. They may be damaged."""
    saved = (path for path in list_checkpoints(directory) if (path / MANIFEST_FILE).exists())
    return sorted({get_checkpoint_step(path) for path in saved})


def list_completed_steps(directory: Path) -> list[int]:
    """Return the steps whose checkpoints were completed, in rising order, even if files are missing now."""
    return sorted({get_checkpoint_step(path) for path in list_checkpoints(directory)})


def find_intact_step(directory: Path, before: int) -> int | None:
    """Return the newest step below `before` whose checkpoint passes verification; None if there is none."""
    for path in reversed(list_checkpoints(directory)):
        if (step := get_checkpoint_step(path)) < before:
            with contextlib.suppress(CheckpointRefused):
                verify_checkpoint(path)
                return step
    return None


def get_checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint that `list_checkpoints` has found."""
    name = parse_checkpoint_name(path.name)
    assert name is not None
    return name[0]


def _iter_pieces(directory: Path, files: Mapping[str, FileRecord]) -> Iterator[tuple[Path, int, str]]:
    """Check names and sizes, and yield path, index and expected checksum of each piece."""
    for name, record in files.items():
        path = directory / name
        with convert_read_errors(path), watch_storage(path):
            size = path.stat().st_size
        if size != record.bytes:
            raise CheckpointRefused(f"{path} is damaged: it has {size} bytes, expected {record.bytes}")
        if len(record.crc32) != _count_pieces(size):
            raise CheckpointRefused(f"{path} is damaged: {len(record.crc32)} checksums for {size} bytes")
        yield from ((path, index, expected) for index, expected in enumerate(record.crc32))


def _verify_piece(path: Path, index: int, expected: str) -> None:
    with convert_read_errors(path):
        actual = _checksum_piece(path, index)
    if actual != expected:
        where = f"the {PIECE_BYTES >> 20} MiB from byte {index * PIECE_BYTES} on"
        raise CheckpointRefused(f"{path} is damaged: {where} have checksum {actual}, expected {expected}")


def _checksum_piece(path: Path, index: int) -> str:
    return f"{compute_part_crc32(path, index * PIECE_BYTES, PIECE_BYTES):08x}"


def _count_pieces(size: int) -> int:
    return -(-size // PIECE_BYTES)
