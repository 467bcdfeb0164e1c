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
from ramify.model.version import Version

MANIFEST = "manifest.json"
CHUNK = 1 << 20  # bytes read at once: they are still in the cache when they are summed up
HEAD = 1 << 28  # bytes of a file's table, at most


@dataclass(frozen=True, slots=True)
class Manifest:
    """The version of a directory and the checksum of each of its weight files."""

    version: Version
    files: Mapping[str, str]

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """The manifest of a published directory."""
        try:
            data = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
            version = Version(str(data["policy"]), int(data["incarnation"]), int(data["step"]))
            return cls(version, {str(name): str(digest) for name, digest in data["files"].items()})
        except OSError as error:
            raise WeightsRefused(f"{directory} has no readable {MANIFEST}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsRefused(f"{directory / MANIFEST} is not a manifest: {error!r}") from error

    def write(self, directory: Path) -> None:
        """Write it into `directory`."""
        policy, incarnation, step = self.version
        data = {"policy": policy, "incarnation": incarnation, "step": step, "files": dict(self.files)}
        write_synced(directory / MANIFEST, json.dumps(data, indent=2).encode())


def verify(directory: Path, like: Path | None = None) -> Manifest:
    """The manifest of `directory`, its files checked; with `like`, its tensors are those of that model."""
    manifest = Manifest.read(directory)
    for name, digest in manifest.files.items():
        check(directory / name, digest)
    if like is not None:
        _compare(directory, shapes(directory, list(manifest.files)), shapes(like))
    return manifest


def check(path: Path, expected: str) -> None:
    """Refuse a file whose checksum is not that of its manifest."""
    actual = checksum(path)
    if actual != expected:
        raise WeightsRefused(f"{path} has checksum {actual}, its manifest says {expected}")


def checksum(path: Path) -> str:
    """CRC-32 of a file, in hexadecimal."""
    found, part = 0, memoryview(bytearray(CHUNK))
    try:
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(part):
                found = zlib.crc32(part[:size], found)
    except OSError as error:
        raise WeightsRefused(f"{path} cannot be read: {error.strerror or error}") from error
    return f"{found:08x}"


def shapes(directory: Path, files: list[str] | None = None) -> dict[str, list[int]]:
    """The shape of every tensor in `directory`, from the heads of its safetensors files; tied copies are left out."""
    names = files if files is not None else sorted(path.name for path in directory.glob("*.safetensors"))
    found: dict[str, list[int]] = {}
    for name in names:
        found.update(_shapes(directory / name))
    if _tied(directory):
        found.pop("lm_head.weight", None)
    return found


def write_synced(path: Path, data: bytes) -> None:
    """Write a file that is on disk when this returns."""
    path.write_bytes(data)
    sync(path)


def sync(path: Path) -> None:
    """Return when what was written to a file is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _compare(directory: Path, found: dict[str, list[int]], wanted: dict[str, list[int]]) -> None:
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    said = [
        f"{len(names)} {what} ({', '.join(names[:3])})"
        for what, names in (("tensors missing", missing), ("unknown tensors", unknown))
        if names
    ]
    wrong = [name for name in wanted if name in found and found[name] != wanted[name]]
    said += [f"{name} has shape {found[name]}, the model {wanted[name]}" for name in wrong[:1]]
    if said:
        raise WeightsRefused(f"{directory} does not fit the model: {'; '.join(said)}")


def _shapes(path: Path) -> dict[str, list[int]]:
    """The head of a safetensors file: its length in 8 bytes, then a table in JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(min(length, HEAD)))
        return {name: list(entry["shape"]) for name, entry in head.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise WeightsRefused(f"{path} is not a safetensors file: {error!r}") from error


def _tied(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"))
    except (OSError, ValueError):
        return False
