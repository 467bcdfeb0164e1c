"""The manifest of a published version: its name, and a checksum of every file. Reading and checking it needs no torch.

The native engine checks the bytes it loads as it loads them. An engine that loads by itself (vLLM) cannot be asked to,
so `verify` checks for it beforehand, as far as that goes without loading: every byte by checksum, every tensor by name
and shape.

The checksum is a CRC: it is there for bytes that were lost on the way, not for an enemy, who could write the manifest
as well; and every step of a run waits for it twice, so it has to keep up with memory.
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ramify.errors import WeightsRefused
from ramify.model.version import PolicyVersion

MANIFEST_FILE = "manifest.json"
READ_BYTES = 1 << 20  # bytes read at once: they are still in the cache when they are summed up
MAX_HEADER_BYTES = 1 << 28  # bytes of a file's table, at most


@dataclass(frozen=True, slots=True)
class Manifest:
    """The version of a directory and the checksum of each of its weight files."""

    version: PolicyVersion
    files: Mapping[str, str]

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """The manifest of a published directory."""
        try:
            data = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
            version = PolicyVersion(str(data["policy"]), int(data["incarnation"]), int(data["step"]))
            return cls(version, {str(name): str(digest) for name, digest in data["files"].items()})
        except OSError as error:
            raise WeightsRefused(f"{directory} has no readable {MANIFEST_FILE}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsRefused(f"{directory / MANIFEST_FILE} is not a manifest: {error!r}") from error

    def write(self, directory: Path) -> None:
        """Write it into `directory`."""
        policy, incarnation, step = self.version
        data = {"policy": policy, "incarnation": incarnation, "step": step, "files": dict(self.files)}
        write_and_fsync(directory / MANIFEST_FILE, json.dumps(data, indent=2).encode())


def verify_weights(directory: Path, reference_model: Path | None = None) -> Manifest:
    """The manifest of `directory`, its files checked; with `like`, its tensors are those of that model."""
    manifest = Manifest.read(directory)
    for name, digest in manifest.files.items():
        check_checksum(directory / name, digest)
    if reference_model is not None:
        _check_same_tensors(
            directory, read_tensor_shapes(directory, list(manifest.files)), read_tensor_shapes(reference_model)
        )
    return manifest


def check_checksum(path: Path, expected: str) -> None:
    """Refuse a file whose checksum is not that of its manifest."""
    actual = compute_checksum(path)
    if actual != expected:
        raise WeightsRefused(f"{path} has checksum {actual}, its manifest says {expected}")


def compute_checksum(path: Path) -> str:
    """CRC-32 of a file, in hexadecimal."""
    found, part = 0, memoryview(bytearray(READ_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(part):
                found = zlib.crc32(part[:size], found)
    except OSError as error:
        raise WeightsRefused(f"{path} cannot be read: {error.strerror or error}") from error
    return f"{found:08x}"


def read_tensor_shapes(directory: Path, files: list[str] | None = None) -> dict[str, list[int]]:
    """The shape of every tensor in `directory`, from the heads of its safetensors files; tied copies are left out."""
    names = files if files is not None else sorted(path.name for path in directory.glob("*.safetensors"))
    found: dict[str, list[int]] = {}
    for name in names:
        found.update(_read_safetensors_header(directory / name))
    if _has_tied_embeddings(directory):
        found.pop("lm_head.weight", None)
    return found


def write_and_fsync(path: Path, data: bytes) -> None:
    """Write a file that is on disk when this returns."""
    path.write_bytes(data)
    fsync_file(path)


def fsync_file(path: Path) -> None:
    """Return when what was written to a file is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _check_same_tensors(directory: Path, actual: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    missing, unknown = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    said = [
        f"{len(names)} {what} ({', '.join(names[:3])})"
        for what, names in (("tensors missing", missing), ("unknown tensors", unknown))
        if names
    ]
    wrong = [name for name in expected if name in actual and actual[name] != expected[name]]
    said += [f"{name} has shape {actual[name]}, the model {expected[name]}" for name in wrong[:1]]
    if said:
        raise WeightsRefused(f"{directory} does not fit the model: {'; '.join(said)}")


def _read_safetensors_header(path: Path) -> dict[str, list[int]]:
    """The head of a safetensors file: its length in 8 bytes, then a table in JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        return {name: list(entry["shape"]) for name, entry in head.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise WeightsRefused(f"{path} is not a safetensors file: {error!r}") from error


def _has_tied_embeddings(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"))
    except (OSError, ValueError):
        return False
