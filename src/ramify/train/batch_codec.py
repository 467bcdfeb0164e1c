"""The bytes of a batch: what the orchestrator sends to a rank, and what a recording stores. Importable without torch.

    magic "RMFB" | header length u32 | crc32 u32 | 4 bytes padding | header (msgpack) | columns, each aligned to 8 bytes

Decoded arrays are views over the buffer: nothing is copied.
"""

import math
import struct
import zlib
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.errors import BatchCorrupt
from ramify.trace import DroppedTargets, Forest, Media, MediaSpan, PolicyVersion, Targets
from ramify.trace.forest import SEGMENT_DTYPE, SEQUENCE_DTYPE
from ramify.train.batch import Batch

MAGIC = b"RMFB"
_PREAMBLE = struct.Struct("<4sII4x")
_ALIGNMENT = 8
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
_TARGET_DTYPES = {column.name: _INT if index < 5 else _FLOAT for index, column in enumerate(fields(Targets))}


class _PackHeader(msgspec.Struct, array_like=True):
    """A forest without its columns."""

    num_tokens: int
    position_axes: int  # 0 if positions are one-dimensional
    num_targets: int
    num_sequences: int
    num_segments: int
    traces: tuple[str, ...]
    envs: tuple[str, ...]
    versions: tuple[tuple[str, int, int], ...]
    media: tuple[tuple[int, int, Media], ...]
    flat_tokens: int
    too_long: tuple[tuple[str, int], ...]
    cut_tokens: int


class _BatchHeader(msgspec.Struct, array_like=True):
    step: int
    entry_counts: dict[str, int]
    packs: list[_PackHeader]


_decode_header = msgspec.msgpack.Decoder(_BatchHeader).decode


def encode_batch(batch: Batch) -> bytes:
    """Encode a batch as one buffer."""
    headers: list[_PackHeader] = []
    columns: list[npt.NDArray[Any]] = []
    for pack in batch.packs:
        headers.append(
            _PackHeader(
                num_tokens=len(pack),
                position_axes=pack.position_ids.shape[0] if pack.position_ids.ndim > 1 else 0,
                num_targets=len(pack.targets),
                num_sequences=len(pack.sequences),
                num_segments=len(pack.segments),
                traces=pack.traces,
                envs=pack.envs,
                versions=tuple((version.policy, version.incarnation, version.step) for version in pack.versions),
                media=tuple((span.start, span.stop, span.media) for span in pack.media),
                flat_tokens=pack.flat_tokens,
                too_long=pack.dropped.overlong_calls,
                cut_tokens=pack.dropped.num_truncated_tokens,
            )
        )
        columns += [pack.token_ids, pack.position_ids, pack.subtree_end]
        columns += [getattr(pack.targets, name) for name in _TARGET_DTYPES]
        columns += [pack.sequences, pack.segments]
    header = msgspec.msgpack.encode(_BatchHeader(batch.step, dict(batch.entry_counts), headers))
    parts = [part for data in (header, *map(_as_bytes, columns)) for part in (data, bytes(-len(data) % _ALIGNMENT))]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([_PREAMBLE.pack(MAGIC, len(header), crc), *parts])


def decode_batch(data: bytes | bytearray | memoryview) -> Batch:
    """Decode a batch; its arrays are read-only views over `data`. Raises BatchCorrupt."""
    view = memoryview(data).toreadonly().cast("B")
    try:
        magic, length, crc = _PREAMBLE.unpack_from(view)
        if magic != MAGIC:
            raise ValueError(f"expected magic {MAGIC!r}, found {magic!r}")
        if zlib.crc32(view[_PREAMBLE.size :]) != crc:
            raise ValueError("the checksum does not match")
        header = _decode_header(view[_PREAMBLE.size : _PREAMBLE.size + length])
        columns = _ColumnReader(view, _PREAMBLE.size + length)
        packs = [_decode_forest(pack_header, columns) for pack_header in header.packs]
        columns.check_fully_read()
        return Batch(header.step, packs, header.entry_counts)
    except (struct.error, msgspec.MsgspecError, ValueError, UnicodeDecodeError) as error:
        raise BatchCorrupt(f"not a batch ({len(view)} bytes): {error}") from error


class _ColumnReader:
    """Reads consecutive arrays from a buffer."""

    def __init__(self, view: memoryview, offset: int) -> None:
        self._view, self._offset = view, offset

    def read(self, dtype: np.dtype[Any], *shape: int) -> npt.NDArray[Any]:
        start = _align(self._offset)
        self._offset = start + dtype.itemsize * math.prod(shape)
        return np.frombuffer(self._view[start : self._offset], dtype).reshape(shape)

    def check_fully_read(self) -> None:
        if _align(self._offset) != len(self._view):
            raise ValueError(f"the columns end at byte {self._offset} of {len(self._view)}")


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _decode_forest(header: _PackHeader, columns: _ColumnReader) -> Forest:
    tokens = header.num_tokens
    return Forest(
        token_ids=columns.read(_INT, tokens),
        position_ids=columns.read(_INT, *((header.position_axes, tokens) if header.position_axes else (tokens,))),
        subtree_end=columns.read(_INT, tokens),
        targets=Targets(*(columns.read(dtype, header.num_targets) for dtype in _TARGET_DTYPES.values())),
        sequences=columns.read(SEQUENCE_DTYPE, header.num_sequences),
        segments=columns.read(SEGMENT_DTYPE, header.num_segments),
        traces=header.traces,
        envs=header.envs,
        versions=tuple(PolicyVersion(*version) for version in header.versions),
        media=tuple(MediaSpan(*span) for span in header.media),
        flat_tokens=header.flat_tokens,
        dropped=DroppedTargets(header.too_long, header.cut_tokens),
    )


def _as_bytes(column: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
