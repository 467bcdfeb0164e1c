"""A batch on its way to the ranks: cut once, shared out, and carried as bytes that are read where they lie.

Whoever cuts a batch knows all of it, so N_c, the entries each component has on all ranks, is fixed there and travels
with every share. A rank then needs nothing from the others: it runs its packs and gradients are summed. All shares have
equally many packs, because ranks meet in every one; a rank without work runs a filler. Importable without torch.

    magic "RMFB" | head length u32 | crc32 u32 | 4 bytes of nothing | head (msgpack) | columns, each aligned to 8 bytes
"""

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.errors import BatchCorrupt
from ramify.model.pack_layout import PackLayout
from ramify.trace import (
    DroppedTargets,
    Forest,
    Media,
    MediaSpan,
    PolicyVersion,
    Targets,
    balance_packs,
    concat_forests,
    make_padding_forest,
    pack_trees,
    split_forest,
)
from ramify.trace.forest import LOSS_COMPONENTS, SEGMENT_DTYPE, SEQUENCE_DTYPE

MAGIC = b"RMFB"
FILLER_TOKENS = 128  # tokens of a pack that only keeps a rank in step
_PREAMBLE = struct.Struct("<4sII4x")
_ALIGNMENT = 8
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
_TARGET_DTYPES = {entry.name: _INT if number < 5 else _FLOAT for number, entry in enumerate(fields(Targets))}


@dataclass(slots=True, frozen=True, eq=False)
class Batch:
    """What one step trains on: this rank's packs, and the entries of each component on all ranks."""

    step: int  # from 0; the weights it makes are those of step + 1
    packs: Sequence[Forest]
    entry_counts: Mapping[str, int]

    @classmethod
    def from_packs(cls, step: int, packs: Sequence[Forest]) -> "Batch":
        """A batch that is all here."""
        found = [each.count_by_component() for each in packs]
        return cls(step, packs, {name: sum(each[name] for each in found) for name in LOSS_COMPONENTS})


class PackSpec(msgspec.Struct, frozen=True):
    """How a trainer wants its packs: what its model reads, how much of it at once, and what that costs."""

    layout: PackLayout = PackLayout.FOREST
    pack_tokens: int = 16384
    per_token: float = 1.0
    per_pair: float = 0.0


def pack_forests(
    forests: Sequence[Forest], pack_tokens: int, layout: PackLayout = PackLayout.FOREST, *, flat: bool = False
) -> list[Forest]:
    """Packs of about `budget` tokens that hold every target of `forests` once.

    `flat` gives every root-to-leaf path a tree of its own: the same gradients at the price of the shared prefixes.
    """
    if layout is PackLayout.CHAINS:
        return _pack_chains([chain for forest in forests for chain in split_forest(forest, 0)], pack_tokens)
    return pack_trees(
        [piece for forest in forests for piece in split_forest(forest, 0 if flat else pack_tokens)], pack_tokens
    )


def split_across_ranks(batch: Batch, pack_spec: PackSpec, world_size: int) -> list[Batch]:
    """The batch of each rank: packs spread by their cost, equally many on all."""
    packs = [each for each in batch.packs if each.num_tokens]
    if not packs:
        return [Batch(batch.step, [make_padding_forest(FILLER_TOKENS)], batch.entry_counts)] * world_size
    table = balance_packs([each.flops(pack_spec.per_token, pack_spec.per_pair) for each in packs], world_size)
    return [
        Batch(
            batch.step, [packs[at] if at >= 0 else make_padding_forest(FILLER_TOKENS) for at in row], batch.entry_counts
        )
        for row in table.tolist()
    ]


def repack(shares: Sequence[Batch], pack_spec: PackSpec, *, flat: bool = False) -> Batch:
    """All shares of a step as one batch, laid out anew; its entries and counts stay what they were."""
    forests = [each for part in shares for each in part.packs if each.num_tokens]
    if flat or pack_spec.layout is PackLayout.CHAINS:
        forests = pack_forests(forests, pack_spec.pack_tokens, pack_spec.layout, flat=flat)
    return Batch(shares[0].step, forests, shares[0].entry_counts)


def _pack_chains(chains: list[Forest], pack_tokens: int) -> list[Forest]:
    """Chains of similar length together, as many as the grid has room for when each is as long as the longest."""
    found: list[list[Forest]] = []
    for chain in sorted(chains, key=len, reverse=True):
        if found and (len(found[-1]) + 1) * len(found[-1][0]) <= pack_tokens:
            found[-1].append(chain)
        else:
            found.append([chain])
    return [concat_forests(each) for each in found]


# -- bytes ---------------------------------------------------------------------------------------------------------


class _PackHeader(msgspec.Struct, array_like=True):
    """A forest without its columns."""

    num_tokens: int
    position_axes: int  # of its positions, 0 where they are one number
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
    """The batch as one buffer."""
    heads: list[_PackHeader] = []
    columns: list[npt.NDArray[Any]] = []
    for each in batch.packs:
        heads.append(
            _PackHeader(
                num_tokens=len(each),
                position_axes=each.position_ids.shape[0] if each.position_ids.ndim > 1 else 0,
                num_targets=len(each.targets),
                num_sequences=len(each.sequences),
                num_segments=len(each.segments),
                traces=each.traces,
                envs=each.envs,
                versions=tuple((version.policy, version.incarnation, version.step) for version in each.versions),
                media=tuple((item.start, item.stop, item.media) for item in each.media),
                flat_tokens=each.flat_tokens,
                too_long=each.dropped.overlong_calls,
                cut_tokens=each.dropped.num_truncated_tokens,
            )
        )
        columns += [
            each.token_ids,
            each.position_ids,
            each.subtree_end,
            *(getattr(each.targets, name) for name in _TARGET_DTYPES),
        ]
        columns += [each.sequences, each.segments]
    parts = [
        msgspec.msgpack.encode(_BatchHeader(batch.step, dict(batch.entry_counts), heads)),
        *map(_as_bytes, columns),
    ]
    padded = [piece for part in parts for piece in (part, bytes(-len(part) % _ALIGNMENT))]
    crc = 0
    for piece in padded:
        crc = zlib.crc32(piece, crc)
    return b"".join([_PREAMBLE.pack(MAGIC, len(parts[0]), crc), *padded])


def decode_batch(data: bytes | bytearray | memoryview) -> Batch:
    """The batch in `data`; its arrays are read-only views over it. Raises BatchCorrupt."""
    view = memoryview(data).toreadonly().cast("B")
    try:
        magic, length, crc = _PREAMBLE.unpack_from(view)
        if magic != MAGIC or zlib.crc32(view[_PREAMBLE.size :]) != crc:
            raise ValueError("the checksum does not match" if magic == MAGIC else f"they begin with {magic!r}")
        head = _decode_header(view[_PREAMBLE.size : _PREAMBLE.size + length])
        columns = _ColumnReader(view, _PREAMBLE.size + length)
        packs = [_decode_forest(each, columns) for each in head.packs]
        columns.check_fully_read()
        return Batch(head.step, packs, head.entry_counts)
    except (struct.error, msgspec.MsgspecError, ValueError, UnicodeDecodeError) as error:
        raise BatchCorrupt(f"{len(view)} bytes are no batch: {error}") from error


class _ColumnReader:
    """Arrays one behind the other."""

    def __init__(self, view: memoryview, offset: int) -> None:
        self._view, self._offset = view, offset

    def read(self, dtype: np.dtype[Any], *shape: int) -> npt.NDArray[Any]:
        start = -(-self._offset // _ALIGNMENT) * _ALIGNMENT
        self._offset = start + dtype.itemsize * math.prod(shape)
        return np.frombuffer(self._view[start : self._offset], dtype).reshape(shape)

    def check_fully_read(self) -> None:
        if -(-self._offset // _ALIGNMENT) * _ALIGNMENT != len(self._view):
            raise ValueError(f"the columns end at {self._offset} of {len(self._view)} bytes")


def _decode_forest(header: _PackHeader, columns: _ColumnReader) -> Forest:
    return Forest(
        token_ids=columns.read(_INT, header.num_tokens),
        position_ids=columns.read(
            _INT, *((header.position_axes, header.num_tokens) if header.position_axes else (header.num_tokens,))
        ),
        subtree_end=columns.read(_INT, header.num_tokens),
        targets=Targets(*(columns.read(dtype, header.num_targets) for dtype in _TARGET_DTYPES.values())),
        sequences=columns.read(SEQUENCE_DTYPE, header.num_sequences),
        segments=columns.read(SEGMENT_DTYPE, header.num_segments),
        traces=header.traces,
        envs=header.envs,
        versions=tuple(PolicyVersion(*version) for version in header.versions),
        media=tuple(MediaSpan(*item) for item in header.media),
        flat_tokens=header.flat_tokens,
        dropped=DroppedTargets(header.too_long, header.cut_tokens),
    )


def _as_bytes(column: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
