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
FILLER = 128  # tokens of a pack that only keeps a rank in step
_PREFIX = struct.Struct("<4sII4x")
_ALIGN = 8
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
_TARGETS = {entry.name: _INT if number < 5 else _FLOAT for number, entry in enumerate(fields(Targets))}


@dataclass(slots=True, frozen=True, eq=False)
class Batch:
    """What one step trains on: this rank's packs, and the entries of each component on all ranks."""

    step: int  # from 0; the weights it makes are those of step + 1
    packs: Sequence[Forest]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, step: int, packs: Sequence[Forest]) -> "Batch":
        """A batch that is all here."""
        found = [each.count_by_component() for each in packs]
        return cls(step, packs, {name: sum(each[name] for each in found) for name in LOSS_COMPONENTS})


class Laying(msgspec.Struct, frozen=True):
    """How a trainer wants its packs: what its model reads, how much of it at once, and what that costs."""

    layout: PackLayout = PackLayout.FOREST
    pack_tokens: int = 16384
    per_token: float = 1.0
    per_pair: float = 0.0


def lay_out(
    forests: Sequence[Forest], budget: int, layout: PackLayout = PackLayout.FOREST, *, flat: bool = False
) -> list[Forest]:
    """Packs of about `budget` tokens that hold every target of `forests` once.

    `flat` gives every root-to-leaf path a tree of its own: the same gradients at the price of the shared prefixes.
    """
    if layout is PackLayout.CHAINS:
        return _grids([chain for forest in forests for chain in split_forest(forest, 0)], budget)
    return pack_trees([piece for forest in forests for piece in split_forest(forest, 0 if flat else budget)], budget)


def shares(batch: Batch, laying: Laying, ranks: int) -> list[Batch]:
    """The batch of each rank: packs spread by their cost, equally many on all."""
    packs = [each for each in batch.packs if each.num_tokens]
    if not packs:
        return [Batch(batch.step, [make_padding_forest(FILLER)], batch.counts)] * ranks
    table = balance_packs([each.flops(laying.per_token, laying.per_pair) for each in packs], ranks)
    return [
        Batch(batch.step, [packs[at] if at >= 0 else make_padding_forest(FILLER) for at in row], batch.counts)
        for row in table.tolist()
    ]


def laid_again(parts: Sequence[Batch], laying: Laying, *, flat: bool = False) -> Batch:
    """All shares of a step as one batch, laid out anew; its entries and counts stay what they were."""
    forests = [each for part in parts for each in part.packs if each.num_tokens]
    if flat or laying.layout is PackLayout.CHAINS:
        forests = lay_out(forests, laying.pack_tokens, laying.layout, flat=flat)
    return Batch(parts[0].step, forests, parts[0].counts)


def _grids(chains: list[Forest], budget: int) -> list[Forest]:
    """Chains of similar length together, as many as the grid has room for when each is as long as the longest."""
    found: list[list[Forest]] = []
    for chain in sorted(chains, key=len, reverse=True):
        if found and (len(found[-1]) + 1) * len(found[-1][0]) <= budget:
            found[-1].append(chain)
        else:
            found.append([chain])
    return [concat_forests(each) for each in found]


# -- bytes ---------------------------------------------------------------------------------------------------------


class _Pack(msgspec.Struct, array_like=True):
    """A forest without its columns."""

    tokens: int
    axes: int  # of its positions, 0 where they are one number
    targets: int
    sequences: int
    segments: int
    traces: tuple[str, ...]
    envs: tuple[str, ...]
    versions: tuple[tuple[str, int, int], ...]
    media: tuple[tuple[int, int, Media], ...]
    flat_tokens: int
    too_long: tuple[tuple[str, int], ...]
    cut_tokens: int


class _Head(msgspec.Struct, array_like=True):
    step: int
    counts: dict[str, int]
    packs: list[_Pack]


_decode_head = msgspec.msgpack.Decoder(_Head).decode


def encode(batch: Batch) -> bytes:
    """The batch as one buffer."""
    heads: list[_Pack] = []
    columns: list[npt.NDArray[Any]] = []
    for each in batch.packs:
        heads.append(
            _Pack(
                tokens=len(each),
                axes=each.position_ids.shape[0] if each.position_ids.ndim > 1 else 0,
                targets=len(each.targets),
                sequences=len(each.sequences),
                segments=len(each.segments),
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
            *(getattr(each.targets, name) for name in _TARGETS),
        ]
        columns += [each.sequences, each.segments]
    parts = [msgspec.msgpack.encode(_Head(batch.step, dict(batch.counts), heads)), *map(_bytes, columns)]
    padded = [piece for part in parts for piece in (part, bytes(-len(part) % _ALIGN))]
    crc = 0
    for piece in padded:
        crc = zlib.crc32(piece, crc)
    return b"".join([_PREFIX.pack(MAGIC, len(parts[0]), crc), *padded])


def decode(data: bytes | bytearray | memoryview) -> Batch:
    """The batch in `data`; its arrays are read-only views over it. Raises BatchCorrupt."""
    view = memoryview(data).toreadonly().cast("B")
    try:
        magic, length, crc = _PREFIX.unpack_from(view)
        if magic != MAGIC or zlib.crc32(view[_PREFIX.size :]) != crc:
            raise ValueError("the checksum does not match" if magic == MAGIC else f"they begin with {magic!r}")
        head = _decode_head(view[_PREFIX.size : _PREFIX.size + length])
        columns = _Columns(view, _PREFIX.size + length)
        packs = [_forest(each, columns) for each in head.packs]
        columns.end()
        return Batch(head.step, packs, head.counts)
    except (struct.error, msgspec.MsgspecError, ValueError, UnicodeDecodeError) as error:
        raise BatchCorrupt(f"{len(view)} bytes are no batch: {error}") from error


class _Columns:
    """Arrays one behind the other."""

    def __init__(self, view: memoryview, at: int) -> None:
        self._view, self._at = view, at

    def take(self, dtype: np.dtype[Any], *shape: int) -> npt.NDArray[Any]:
        start = -(-self._at // _ALIGN) * _ALIGN
        self._at = start + dtype.itemsize * math.prod(shape)
        return np.frombuffer(self._view[start : self._at], dtype).reshape(shape)

    def end(self) -> None:
        if -(-self._at // _ALIGN) * _ALIGN != len(self._view):
            raise ValueError(f"the columns end at {self._at} of {len(self._view)} bytes")


def _forest(head: _Pack, columns: _Columns) -> Forest:
    return Forest(
        token_ids=columns.take(_INT, head.tokens),
        position_ids=columns.take(_INT, *((head.axes, head.tokens) if head.axes else (head.tokens,))),
        subtree_end=columns.take(_INT, head.tokens),
        targets=Targets(*(columns.take(dtype, head.targets) for dtype in _TARGETS.values())),
        sequences=columns.take(SEQUENCE_DTYPE, head.sequences),
        segments=columns.take(SEGMENT_DTYPE, head.segments),
        traces=head.traces,
        envs=head.envs,
        versions=tuple(PolicyVersion(*version) for version in head.versions),
        media=tuple(MediaSpan(*item) for item in head.media),
        flat_tokens=head.flat_tokens,
        dropped=DroppedTargets(head.too_long, head.cut_tokens),
    )


def _bytes(column: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
