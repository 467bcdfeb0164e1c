"""The manifest of a published version: its name, and a checksum of every file. Reading and checking it needs no torch.

The native engine verifies files as it loads them. An engine that loads files by itself (vLLM) does not, so
`verify_weights` checks them beforehand as far as that is possible without loading: every byte by checksum, every tensor
by name and shape.

The checksum is a CRC. It protects against bytes that were lost on the way, not against an attacker, who could write the
manifest as well. Every step of a run waits for it twice, so it has to be as fast as memory.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from ramify.core.async_calls import map_in_daemon_threads
from ramify.core.errors import WeightsRefused
from ramify.core.files import read_bytes, write_and_fsync
from ramify.core.watchdog import watch_storage
from ramify.model.resolve import is_loaded_as_text, read_model_config
from ramify.trace.version import PolicyVersion

# The CRC-32 of a file, computed by several threads: one thread would take longer than to write the file.
#
# The parts of a file have CRCs of their own, which are combined: the CRC of a text followed by n bytes is a linear map
# of the text's CRC that depends on n only, a matrix over GF(2) with a row for each bit.

PART_BYTES = 64 << 20
READ_BYTES = 1 << 20  # small enough to be in the CPU cache when they are summed
MAX_THREADS = 8
POLYNOMIAL = 0xEDB88320


def compute_crc32(path: Path) -> int:
    """Return the CRC-32 of a file. Raises OSError."""
    with watch_storage(path):
        size = path.stat().st_size
    starts = range(0, size, PART_BYTES)
    if len(starts) < 2:
        return compute_part_crc32(path, 0, PART_BYTES)
    compute = partial(compute_part_crc32, path, num_bytes=PART_BYTES)
    parts = map_in_daemon_threads(compute, starts, max_threads=MAX_THREADS)
    crc = parts[0]
    for start, part in zip(starts[1:], parts[1:]):
        crc = _apply(_power_of_byte(min(PART_BYTES, size - start)), crc) ^ part
    return crc


def compute_part_crc32(path: Path, start: int, num_bytes: int) -> int:
    """Return the CRC-32 of at most `num_bytes` bytes of a file from `start` on. Raises OSError."""
    crc, remaining, buffer = 0, num_bytes, memoryview(bytearray(READ_BYTES))
    with watch_storage(path, num_bytes), path.open("rb", buffering=0) as file:
        file.seek(start)
        while remaining and (size := file.readinto(buffer[:remaining])):
            crc = zlib.crc32(buffer[:size], crc)
            remaining -= size
    return crc


@lru_cache(maxsize=16)
def _power_of_byte(count: int) -> tuple[int, ...]:
    """Return the matrix of `count` zero bytes."""
    result = tuple(1 << bit for bit in range(32))  # the identity
    square = tuple(_shift_byte(1 << bit) for bit in range(32))
    while count:
        if count & 1:
            result = _multiply(square, result)
        square, count = _multiply(square, square), count >> 1
    return result


def _shift_byte(value: int) -> int:
    """Return the state after one zero byte."""
    for _ in range(8):
        value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
    return value


def _multiply(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_apply(left, row) for row in right)


def _apply(matrix: tuple[int, ...], value: int) -> int:
    result = 0
    for bit in range(32):
        if value >> bit & 1:
            result ^= matrix[bit]
    return result


MANIFEST_FILE = "manifest.json"
# Parts of the names of weights of vision towers.
TOWER_NAMES = ("visual.", "vision_model.", "vqmodel.", "connector.", "multi_modal_projector.")
MTP_PREFIX = "mtp."  # of the names of heads that predict several tokens
Shape = list[int]


@dataclass(frozen=True, slots=True)
class PublishedAdapters:
    """What a version that holds only adapters is added to: the model directory, and how its matrices are quantized."""

    base_model: Path
    scaling: float
    quantize: Literal["8bit", "4bit"] | None = None

    @classmethod
    def from_directory(cls, directory: Path) -> "PublishedAdapters | None":
        """Read them from a published directory; None if it is a complete model. Raises WeightsRefused."""
        return Manifest.read(directory).adapters if (directory / MANIFEST_FILE).is_file() else None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The version of a directory and the checksum of each of its weight files."""

    version: PolicyVersion
    files: Mapping[str, str]
    adapters: PublishedAdapters | None = None  # if the files hold only adapters

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read the manifest of a published directory. Raises WeightsRefused."""
        try:
            data = json.loads(read_bytes(directory / MANIFEST_FILE))
            version = PolicyVersion(str(data["policy"]), int(data["incarnation"]), int(data["step"]))
            files = {str(name): str(digest) for name, digest in data["files"].items()}
            if (table := data.get("adapters")) is None:
                return cls(version, files)
            adapters = PublishedAdapters(Path(table["base_model"]), float(table["scaling"]), table["quantize"])
            return cls(version, files, adapters)
        except OSError as error:
            raise WeightsRefused(f"{directory} has no readable {MANIFEST_FILE}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsRefused(f"{directory / MANIFEST_FILE} is not a manifest: {error!r}") from error

    def write(self, directory: Path) -> None:
        """Write the manifest into `directory`."""
        policy, incarnation, step = self.version
        data: dict[str, Any] = {
            "policy": policy,
            "incarnation": incarnation,
            "step": step,
            "files": dict(self.files),
        }
        if self.adapters is not None:
            data["adapters"] = {**asdict(self.adapters), "base_model": str(self.adapters.base_model)}
        write_and_fsync(directory / MANIFEST_FILE, json.dumps(data, indent=2).encode())


def verify_weights(directory: Path, reference_model: Path | None = None) -> Manifest:
    """Check the files of a published directory and return its manifest. Raises WeightsRefused.

    If `reference_model` is given, the tensors must have the names and shapes of that model's.
    """
    manifest = Manifest.read(directory)
    for name, digest in manifest.files.items():
        check_checksum(directory / name, digest)
    if reference_model is not None:
        tensors = read_tensor_shapes(directory, list(manifest.files))
        check_same_tensors(directory, tensors, read_tensor_shapes(reference_model))
    return manifest


def check_checksum(path: Path, expected: str) -> None:
    """Raise WeightsRefused if the checksum of a file is not the one in its manifest."""
    actual = compute_checksum(path)
    if actual != expected:
        raise WeightsRefused(f"{path} has checksum {actual}, its manifest says {expected}")


def compute_checksum(path: Path) -> str:
    """Return the CRC-32 of a file in hexadecimal. Raises WeightsRefused."""
    try:
        crc = compute_crc32(path)
    except OSError as error:
        raise WeightsRefused(f"{path} cannot be read: {error.strerror or error}") from error
    return f"{crc:08x}"


def read_tensor_shapes(directory: Path, files: list[str] | None = None) -> dict[str, Shape]:
    """Return the shape of every tensor in the safetensors files of `directory`, without tied copies.

    Without `files`, a directory of adapters has the tensors of its base model, and tensors that are never loaded are
    left out: heads that predict several tokens, and the tower of a model of which only the text part is loaded.
    """
    if files is None and (adapters := PublishedAdapters.from_directory(directory)) is not None:
        directory = adapters.base_model
    names = files if files is not None else sorted(path.name for path in directory.glob("*.safetensors"))
    shapes: dict[str, Shape] = {}
    for name in names:
        shapes.update(_read_safetensors_header(directory / name))
    if read_model_config(directory).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    if files is None:
        tower_names = TOWER_NAMES if is_loaded_as_text(directory) else ()
        for name in list(shapes):
            if name.startswith(MTP_PREFIX) or any(part in name for part in tower_names):
                del shapes[name]
    return shapes


def check_same_tensors(source: Path | str, actual: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Raise WeightsRefused unless the tensors of `source` have the names and shapes of the model's."""
    missing, unknown = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    problems = [
        f"{len(names)} {problem} ({', '.join(names[:3])})"
        for problem, names in (("tensors missing", missing), ("unknown tensors", unknown))
        if names
    ]
    differing = [name for name in expected if name in actual and actual[name] != expected[name]]
    problems += [f"{name} has shape {actual[name]}, the model {expected[name]}" for name in differing[:1]]
    if problems:
        raise WeightsRefused(f"{source} does not fit the model: {'; '.join(problems)}")


def _read_safetensors_header(path: Path) -> dict[str, Shape]:
    """Return the shapes in the header of a safetensors file. Raises WeightsRefused if it cannot be read."""
    try:
        with safe_open(path, framework="np") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise WeightsRefused(f"{path} is not a safetensors file: {error!r}") from error
