"""The forest: what the trainer computes, as flat arrays.

Traces that begin with the same tokens are merged on them and laid out depth first. One number per token, `end`, then
says who sees whom: **query q sees key k iff k <= q < end[k]**. That one rule is causality, branching and the packing of
many trees into one row.

Two attempts at the prompt `a b`, one sampled `c d`, the other `c e`:

    index      0  1  2  3  4
    ids        a  b  c  d  e
    position   0  1  2  3  3
    end        5  5  5  4  5         e (4) sees a, b, c, not d: 3 <= 4 < end[3] = 4 fails
    targets    c (from b) twice, d (from c), e (from c): two entries for the shared c, one per attempt

Every stage yields the same type: a group merged (`grow`), a tree cut to the budget (`cut`), a row of trees (`pack`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ramify.trace.columns import Float32Array, Int32Array, concat_ranges, concat_tables
from ramify.trace.message import Media

# One row per model call (or annotated message) that targets come from; `trace` and `env` point into the tables.
SEQUENCE_DTYPE = np.dtype([("trace", "<i4"), ("node", "<i4"), ("env", "<i4"), ("temperature", "<f4")])

# A stretch of layout without forks, in depth-first order: it begins at `start`, `depth` tokens below its root, holds
# `length` tokens, and its subtree is the segments up to but without `last`.
SEGMENT_DTYPE = np.dtype([("start", "<i4"), ("length", "<i4"), ("depth", "<i4"), ("parent", "<i4"), ("last", "<i4")])

StructuredArray = npt.NDArray[Any]


class PolicyVersion(NamedTuple):
    """A version of a policy's weights: a restarted trainer counts steps in a new incarnation."""

    policy: str
    incarnation: int
    step: int


LOSS_COMPONENTS = ("rl", "ce", "ref_kl")


@dataclass(slots=True, frozen=True, eq=False)
class Targets:
    """One entry per trained (trace, node, token), by column.

    `index` is the token's own place in the layout, `source` that of the token before it on its path, which is not
    always the place before it.
    """

    token: Int32Array
    token_index: Int32Array
    logits_index: Int32Array
    sequence: Int32Array  # which model call, a row of `Forest.sequences`
    version: Int32Array  # which weights, an entry of `Forest.versions`; -1 where none is known
    logprob: Float32Array  # the sampler's; NaN where only ce applies
    advantage: Float32Array
    rl: Float32Array
    ce: Float32Array
    ref_kl: Float32Array
    ref_logprob: Float32Array  # the reference model's logprob; NaN where none is known

    def __len__(self) -> int:
        return len(self.token)

    def select(self, indices: npt.NDArray[np.int64] | slice) -> Targets:
        return Targets(*(getattr(self, name)[indices] for name in _TARGET_COLUMNS))

    @classmethod
    def concat(cls, parts: Sequence[Targets]) -> Targets:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in _TARGET_COLUMNS))

    @classmethod
    def empty(cls) -> Targets:
        ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
        return cls(ints, ints, ints, ints, ints, floats, floats, floats, floats, floats, floats)


_TARGET_COLUMNS = tuple(entry.name for entry in fields(Targets))


@dataclass(slots=True, frozen=True)
class MediaSpan:
    """An image and the layout indices [start, stop) of its placeholders."""

    start: int
    stop: int
    media: Media


@dataclass(slots=True, frozen=True)
class DroppedTargets:
    """What was left out, by name: calls on paths over `seq_len`, and tokens cut off the end of one."""

    overlong_calls: tuple[tuple[str, int], ...] = ()  # (trace, node)
    num_truncated_tokens: int = 0


@dataclass(slots=True, frozen=True, eq=False)
class Forest:
    """Trees laid out depth first, the targets on them, and the tables the targets point into.

    Targets of one sequence stand together and in order of depth, sequences in the order of their table. The tables of
    names (traces, envs, versions) may hold more than this forest uses.
    """

    token_ids: Int32Array
    position_ids: Int32Array  # [N], or [3, N] where rotary positions have several axes
    subtree_end: Int32Array
    targets: Targets
    sequences: StructuredArray
    segments: StructuredArray
    traces: tuple[str, ...] = ()
    envs: tuple[str, ...] = ()
    versions: tuple[PolicyVersion, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    flat_tokens: int = 0  # what the same paths would be, each laid out whole; a tree that is cut tells it once
    dropped: DroppedTargets = field(default_factory=DroppedTargets)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.segments["length"].sum())

    @property
    def num_attention_pairs(self) -> int:
        """(query, key) pairs that attention computes: key k is seen by end[k] - k queries."""
        return int(self.subtree_end.sum(dtype=np.int64)) - len(self) * (len(self) - 1) // 2

    def flops(self, flops_per_token: float, flops_per_pair: float) -> float:
        """The cost of the row for a model that spends so much on a token and on a visible pair."""
        return flops_per_token * len(self) + flops_per_pair * self.num_attention_pairs

    def count_by_component(self) -> dict[str, int]:
        """N_c: the entries each loss component applies to."""
        return {name: int(np.count_nonzero(getattr(self.targets, name))) for name in LOSS_COMPONENTS}

    def expand_sequence_column(self, name: str) -> npt.NDArray[Any]:
        """A column of `sequences` (trace, node, env, temperature), one value per target."""
        return self.sequences[name][self.targets.sequence]

    def unique_head_inputs(self) -> tuple[Int32Array, Int32Array, npt.NDArray[np.int64]]:
        """The distinct (source, token) pairs the LM head must score, and for each target which one is its own."""
        source, token = self.targets.logits_index, self.targets.token
        joined = source.astype(np.int64) << 32 | token
        if (joined[1:] > joined[:-1]).all():  # trees without forks
            return source, token, np.arange(len(joined))
        # Most stand in order, which a stable sort is quick with; asked for `first`, numpy takes one
        _, first, inverse = np.unique(joined, return_index=True, return_inverse=True)
        return source[first], token[first], inverse

    def build_attention_mask(self) -> npt.NDArray[np.bool_]:
        """The mask [query, key], for small forests and for reading."""
        index = np.arange(len(self))
        return (index[None, :] <= index[:, None]) & (index[:, None] < self.subtree_end[None, :])

    def select(self, segment_mask: npt.NDArray[np.bool_], sequence_indices: Int32Array) -> Forest:
        """The forest of the chosen segments and of the targets of `calls`, rows of `sequences` in rising order.

        The segments must be closed under ancestors and hold every token of the targets.
        """
        table = self.segments
        edges = np.flatnonzero(np.diff(segment_mask, prepend=False, append=False))
        starts = table["start"][edges[::2]]  # neighbouring segments are one stretch of the layout
        stops = (table["start"] + table["length"])[edges[1::2] - 1]
        shift = np.cumsum(stops - starts, dtype=np.int32) - stops

        def shift_indices(at: npt.NDArray[Any]) -> Int32Array:
            return at + shift[np.searchsorted(starts, at, "right") - 1]

        def take_tokens(array: Int32Array) -> Int32Array:
            return np.concatenate([array[..., a:b] for a, b in zip(starts.tolist(), stops.tolist())], axis=-1)

        order = np.cumsum(segment_mask, dtype=np.int32) - segment_mask
        segments = table[segment_mask]
        segments["start"] = shift_indices(segments["start"])
        segments["last"] = np.append(order, len(segments))[segments["last"]]
        segments["parent"] = np.where(segments["parent"] >= 0, order[segments["parent"]], -1)
        first = np.searchsorted(self.targets.sequence, sequence_indices)
        after = np.searchsorted(self.targets.sequence, sequence_indices, "right")
        counts = after - first
        together = np.array_equal(first[1:], after[:-1])  # most often: then a view does
        entries = self.targets.select(slice(first[0], after[-1]) if together else concat_ranges(first, counts))
        whole = np.append(segment_mask, False)[
            np.searchsorted(table["start"], [m.start for m in self.media], "right") - 1
        ]
        media = [item for item, inside in zip(self.media, whole) if inside]
        return Forest(
            token_ids=take_tokens(self.token_ids),
            position_ids=take_tokens(self.position_ids),
            subtree_end=compute_subtree_ends(segments),
            targets=replace(
                entries,
                token_index=shift_indices(entries.token_index),
                logits_index=shift_indices(entries.logits_index),
                sequence=np.repeat(np.arange(len(sequence_indices), dtype=np.int32), counts),
            ),
            sequences=self.sequences[sequence_indices],
            segments=segments,
            traces=self.traces,
            envs=self.envs,
            versions=self.versions,
            media=tuple(
                MediaSpan(int(at), int(at) + item.stop - item.start, item.media)
                for item, at in zip(media, shift_indices(np.array([item.start for item in media], np.int32)))
            ),
        )


def compute_subtree_ends(segments: StructuredArray) -> Int32Array:
    """`end` of each token: all tokens of a segment have the same subtree behind them."""
    stops = segments["start"] + segments["length"]
    return np.repeat(stops[segments["last"] - 1], segments["length"])


def make_padding_forest(length: int) -> Forest:
    """Tokens that see only themselves: the padding of a row, or the whole row of a rank that has no pack left."""
    ids = np.zeros(length, np.int32)
    end = np.arange(1, length + 1, dtype=np.int32)
    return Forest(ids, ids, end, Targets.empty(), np.empty(0, SEQUENCE_DTYPE), np.empty(0, SEGMENT_DTYPE))


def pad_forest(forest: Forest, length: int) -> Forest:
    """The forest with a filler behind it, `length` tokens in all."""
    more = make_padding_forest(length - len(forest))
    return replace(
        forest,
        token_ids=np.concatenate([forest.token_ids, more.token_ids]),
        position_ids=_concat_position_ids([forest.position_ids, more.position_ids]),
        subtree_end=np.concatenate([forest.subtree_end, more.subtree_end + np.int32(len(forest))]),
    )


def concat_forests(forests: Sequence[Forest]) -> Forest:
    """Forests side by side in one row: no token of one sees a token of another."""
    if len(forests) < 2:
        return forests[0] if forests else make_padding_forest(0)
    traces, envs, versions = _Interner(), _Interner(), _Interner()
    targets: list[Targets] = []
    sequences: list[StructuredArray] = []
    segments: list[StructuredArray] = []
    ends: list[Int32Array] = []
    media: list[MediaSpan] = []
    tokens = rows = pieces = 0
    for forest in forests:
        entries, calls, table = forest.targets, forest.sequences.copy(), forest.segments.copy()
        entries = replace(
            entries,
            token_index=entries.token_index + np.int32(tokens),
            logits_index=entries.logits_index + np.int32(tokens),
            sequence=entries.sequence + np.int32(rows),
            version=versions.renumber(forest.versions, entries.version),
        )
        calls["trace"] = traces.renumber(forest.traces, calls["trace"])
        calls["env"] = envs.renumber(forest.envs, calls["env"])
        table["start"] += tokens
        table["last"] += pieces
        table["parent"] += np.where(table["parent"] >= 0, pieces, 0)
        targets.append(entries)
        sequences.append(calls)
        segments.append(table)
        ends.append(forest.subtree_end + np.int32(tokens))
        media += [MediaSpan(item.start + tokens, item.stop + tokens, item.media) for item in forest.media]
        tokens, rows, pieces = tokens + len(forest), rows + len(calls), pieces + len(table)
    return Forest(
        token_ids=np.concatenate([forest.token_ids for forest in forests]),
        position_ids=_concat_position_ids([forest.position_ids for forest in forests]),
        subtree_end=np.concatenate(ends),
        targets=Targets.concat(targets),
        sequences=concat_tables(sequences, SEQUENCE_DTYPE),
        segments=concat_tables(segments, SEGMENT_DTYPE),
        traces=tuple(traces.values),
        envs=tuple(envs.values),
        versions=tuple(versions.values),
        media=tuple(media),
        flat_tokens=sum(forest.flat_tokens for forest in forests),
        dropped=DroppedTargets(
            tuple(call for forest in forests for call in forest.dropped.overlong_calls),
            sum(forest.dropped.num_truncated_tokens for forest in forests),
        ),
    )


class _Interner:
    """Values numbered in order of appearance, across forests that number them each their own way."""

    def __init__(self) -> None:
        self.values: dict[Any, int] = {}

    def renumber(self, values: Sequence[Any], indices: npt.NDArray[Any]) -> npt.NDArray[Any]:
        new = [self.values.setdefault(name, len(self.values)) for name in values]
        return np.array([*new, -1], np.int32)[indices]  # -1 stays -1


def _concat_position_ids(parts: list[Int32Array]) -> Int32Array:
    """Rows of one-axis and three-axis positions side by side: text counts the same on every axis."""
    axes = max(part.ndim for part in parts)
    if axes == 2:
        parts = [part if part.ndim == 2 else np.broadcast_to(part, (3, len(part))) for part in parts]
    return np.concatenate(parts, axis=-1)
