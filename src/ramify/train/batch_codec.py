"""The bytes of a batch: what the orchestrator sends to a rank, and what a recording stores. Importable without torch.

    magic "RMFB" | header length u32 | crc32 u32 | 4 bytes padding | header (msgpack) | columns, each aligned to 8 bytes

Decoded arrays are views over the buffer: nothing is copied.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.core.errors import DataCorrupt
from ramify.trace import DroppedTargets, Forest, Media, MediaSpan, PolicyVersion, Targets
from ramify.trace.annotation import TOP_DTYPE
from ramify.trace.codec import ALIGNMENT, align_up, byte_view, split_body
from ramify.trace.forest import CALL_DTYPE, SEGMENT_DTYPE
from ramify.train.batch import Batch

MAGIC = b"RMFB"
_PREAMBLE = struct.Struct("<4sII4x")
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
_TOP_COLUMN = "ref_top"  # the only one with two dimensions
_TARGET_NAMES = [column.name for column in fields(Targets) if column.name != _TOP_COLUMN]
_TARGET_DTYPES = {name: _INT if index < 5 else _FLOAT for index, name in enumerate(_TARGET_NAMES)}


class _PackHeader(msgspec.Struct, array_like=True):
    """A forest without its columns."""

    num_tokens: int
    position_axes: int  # 0: positions have one axis
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
    top_k: int = 0
    unique_tokens: int = 0


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
                position_axes=0,
                num_targets=len(pack.targets),
                num_sequences=len(pack.calls),
                num_segments=len(pack.segments),
                traces=pack.traces,
                envs=pack.envs,
                versions=tuple((version.policy, version.incarnation, version.step) for version in pack.versions),
                media=tuple((span.start, span.stop, span.media) for span in pack.media),
                flat_tokens=pack.flat_tokens,
                too_long=pack.dropped.overlong_calls,
                cut_tokens=pack.dropped.num_truncated_tokens,
                top_k=pack.targets.ref_top.shape[1] if pack.targets.ref_top.size else 0,
                unique_tokens=pack.unique_tokens,
            )
        )
        columns += [pack.token_ids, pack.position_ids, pack.subtree_end]
        columns += [getattr(pack.targets, name) for name in _TARGET_DTYPES]
        columns += [pack.calls, pack.segments]
        columns += [pack.targets.ref_top] if pack.targets.ref_top.size else []
    header = msgspec.msgpack.encode(_BatchHeader(batch.step, dict(batch.entry_counts), headers))
    parts = [part for data in (header, *map(byte_view, columns)) for part in (data, bytes(-len(data) % ALIGNMENT))]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([_PREAMBLE.pack(MAGIC, len(header), crc), *parts])


def decode_batch(data: bytes | bytearray | memoryview) -> Batch:
    """Decode a batch; its arrays are read-only views over `data`. Raises DataCorrupt."""
    view = memoryview(data).toreadonly().cast("B")
    try:
        magic, length, crc = _PREAMBLE.unpack_from(view)
        if magic != MAGIC:
            raise ValueError(f"expected magic {MAGIC!r}, found {magic!r}")
        if zlib.crc32(view[_PREAMBLE.size :]) != crc:
            raise ValueError("the checksum does not match")
        header = _decode_header(view[_PREAMBLE.size : _PREAMBLE.size + length])
        layout = [column for pack in header.packs for column in _list_columns(pack)]
        body = view[align_up(_PREAMBLE.size + length) :]
        parts = split_body(body, [dtype.itemsize * math.prod(shape) for dtype, shape in layout])
        columns = (np.frombuffer(part, dtype).reshape(shape) for part, (dtype, shape) in zip(parts, layout))
        return Batch(header.step, [_decode_forest(pack, columns) for pack in header.packs], header.entry_counts)
    except (struct.error, msgspec.MsgspecError, ValueError, DataCorrupt) as error:
        raise DataCorrupt(f"not a batch ({len(view)} bytes): {error}") from error


def _list_columns(header: _PackHeader) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    """Return dtype and shape of each column of a pack, in order."""
    tokens = header.num_tokens
    return [
        *[(_INT, (tokens,))] * 3,
        *((dtype, (header.num_targets,)) for dtype in _TARGET_DTYPES.values()),
        (CALL_DTYPE, (header.num_sequences,)),
        (SEGMENT_DTYPE, (header.num_segments,)),
        *([(TOP_DTYPE, (header.num_targets, header.top_k))] if header.top_k else []),
    ]


def _decode_forest(header: _PackHeader, columns: Iterator[npt.NDArray[Any]]) -> Forest:
    token_ids, position_ids, subtree_end = islice(columns, 3)
    target_columns = list(islice(columns, len(_TARGET_DTYPES)))
    calls, segments = islice(columns, 2)
    ref_top = next(columns) if header.top_k else np.empty((header.num_targets, 0), TOP_DTYPE)
    return Forest(
        token_ids=token_ids,
        position_ids=position_ids,
        subtree_end=subtree_end,
        targets=Targets(*target_columns, ref_top=ref_top),
        calls=calls,
        segments=segments,
        traces=header.traces,
        envs=header.envs,
        versions=tuple(PolicyVersion(*version) for version in header.versions),
        media=tuple(MediaSpan(*span) for span in header.media),
        flat_tokens=header.flat_tokens,
        unique_tokens=header.unique_tokens,
        dropped=DroppedTargets(header.too_long, header.cut_tokens),
    )
