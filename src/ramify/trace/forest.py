"""The forest: token trees as flat arrays, which the trainer computes.

Traces are merged on equal token prefixes and laid out depth first. One number per token, `subtree_end`, then defines
the attention mask: **query q sees key k iff k <= q < subtree_end[k]**. This rule covers causality, branching and the
packing of many trees into one sequence.

Two attempts at the prompt `a b`, one sampled `c d`, the other `c e`:

    index          0  1  2  3  4
    token_ids      a  b  c  d  e
    position_ids   0  1  2  3  3
    subtree_end    5  5  5  4  5     e (4) sees a, b, c, not d: 3 <= 4 < subtree_end[3] = 4 fails
    targets        c (after b) twice, d (after c), e (after c): two entries for the shared c, one per attempt

Every stage returns this type: a merged group (`build_forest`), the pieces of a tree (`split_forest`), a pack of trees
(`pack_trees`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.trace.annotation import TOP_DTYPE
from ramify.trace.columns import Float32Array, Int32Array, StructuredArray, concat_ranges, concat_tables
from ramify.trace.message import Media
from ramify.trace.version import PolicyVersion

# One row per model call (or annotated message) with targets; `trace` and `env` are indices into the forest's tables.
CALL_DTYPE = np.dtype([("trace", "<i4"), ("node", "<i4"), ("env", "<i4"), ("temperature", "<f4")])

# A part of the layout without forks; segments are in depth-first order. A segment starts at index `start`, `depth`
# tokens below its root, and has `length` tokens. Its subtree is all segments from itself up to, but excluding,
# `subtree_stop`.
SEGMENT_DTYPE = np.dtype(
    [("start", "<i4"), ("length", "<i4"), ("depth", "<i4"), ("parent", "<i4"), ("subtree_stop", "<i4")]
)


# A reference logprob that the trainer computes itself: with its adapters off, it has the model that a run started from.
START_LOGPROB = float("inf")
LOSS_COMPONENTS = ("rl", "ce", "ref_kl", "kl")


@dataclass(slots=True, frozen=True, eq=False)
class Targets:
    """One entry per trained (trace, node, token), by column.

    `token_index` is the token's index in the layout, `logits_index` the index of the previous token on its path, whose
    logits predict it; at a fork that is not the index before it.
    """

    token: Int32Array
    token_index: Int32Array
    logits_index: Int32Array
    call: Int32Array  # index into `Forest.calls`: the model call
    version: Int32Array  # index into `Forest.versions`: the sampling weights; -1 if unknown, or if only ce applies
    logprob: Float32Array  # of the sampler; NaN if only ce applies
    advantage: Float32Array
    rl: Float32Array
    ce: Float32Array
    ref_kl: Float32Array
    ref_logprob: Float32Array  # of the reference model; NaN if unknown, START_LOGPROB if the trainer computes it
    kl: Float32Array
    ref_top: StructuredArray  # [targets, k], as TOP_DTYPE: the reference's likeliest tokens; k is 0 if ref_kl uses none

    def __len__(self) -> int:
        return len(self.token)

    def select(self, indices: npt.NDArray[np.int64] | slice) -> "Targets":
        """Return the entries at these indices."""
        return Targets(*(getattr(self, name)[indices] for name in _TARGET_COLUMNS))

    @classmethod
    def concat(cls, parts: Sequence["Targets"]) -> "Targets":
        """Return the entries of all parts, in order."""
        columns = {name: [getattr(part, name) for part in parts] for name in _TARGET_COLUMNS}
        top_k = max(part.ref_top.shape[1] for part in parts)
        columns["ref_top"] = [pad_top_k(part.ref_top, top_k) for part in parts]
        return cls(*(np.concatenate(arrays) for arrays in columns.values()))

    @classmethod
    def empty(cls) -> "Targets":
        """Return targets without entries."""
        ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
        top = np.empty((0, 0), TOP_DTYPE)
        return cls(ints, ints, ints, ints, ints, floats, floats, floats, floats, floats, floats, floats, top)


def pad_top_k(top: StructuredArray, top_k: int) -> StructuredArray:
    """Return rows of likeliest tokens with `top_k` columns; the new ones hold no token."""
    if top.shape[1] == top_k:
        return top
    widened = np.full((len(top), top_k), np.array((-1, -np.inf), TOP_DTYPE))
    widened[:, : top.shape[1]] = top
    return widened


_TARGET_COLUMNS = tuple(column.name for column in fields(Targets))


@dataclass(slots=True, frozen=True)
class MediaSpan:
    """An image and the layout indices [start, stop) of its placeholders."""

    start: int
    stop: int
    media: Media


@dataclass(slots=True, frozen=True)
class DroppedTargets:
    """What `build_forest` left out: model calls on paths longer than `seq_len`, and tokens truncated at its end."""

    overlong_calls: tuple[tuple[str, int], ...] = ()  # (trace id, node)
    num_truncated_tokens: int = 0


@dataclass(slots=True, frozen=True, eq=False)
class Forest:
    """Trees laid out depth first, their targets, and the tables that the targets refer to.

    Targets are sorted by call, then by depth. The tables `traces`, `envs` and `versions` may hold more than this
    forest uses. `flat_tokens` is the number of tokens of the same paths without prefix sharing, `unique_tokens` the
    number of tokens of the trees that `build_forest` returned. After a split only the first piece carries both numbers,
    so their sums over packs stay the same.
    """

    token_ids: Int32Array
    position_ids: Int32Array
    subtree_end: Int32Array
    targets: Targets
    calls: StructuredArray
    segments: StructuredArray
    traces: tuple[str, ...] = ()
    envs: tuple[str, ...] = ()
    versions: tuple[PolicyVersion, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    flat_tokens: int = 0
    unique_tokens: int = 0
    dropped: DroppedTargets = field(default_factory=DroppedTargets)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding."""
        return int(self.segments["length"].sum())

    @property
    def num_attention_pairs(self) -> int:
        """The number of (query, key) pairs of the attention mask: key k is seen by subtree_end[k] - k queries."""
        return int(self.subtree_end.sum(dtype=np.int64)) - len(self) * (len(self) - 1) // 2

    def flops(self, flops_per_token: float, flops_per_pair: float) -> float:
        """Estimate the FLOPs from the cost per token and per attention pair."""
        return flops_per_token * len(self) + flops_per_pair * self.num_attention_pairs

    def count_by_component(self) -> dict[str, int]:
        """Return for each loss component the number of entries with a weight that is not zero."""
        return {name: int(np.count_nonzero(getattr(self.targets, name))) for name in LOSS_COMPONENTS}

    def expand_call_column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of `calls` (trace, node, env or temperature) with one value per target."""
        return self.calls[name][self.targets.call]

    def unique_head_inputs(self) -> tuple[Int32Array, Int32Array, npt.NDArray[np.int64]]:
        """Return the distinct (logits_index, token) pairs that the LM head scores, and the pair's index per target."""
        logits_index, token = self.targets.logits_index, self.targets.token
        pairs = logits_index.astype(np.int64) << 32 | token
        if (pairs[1:] > pairs[:-1]).all():  # trees without forks
            return logits_index, token, np.arange(len(pairs))
        # The pairs are mostly sorted, which a stable sort exploits; with `return_index`, numpy uses a stable one.
        _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
        return logits_index[first], token[first], inverse

    def build_attention_mask(self) -> npt.NDArray[np.bool_]:
        """Return the dense attention mask [query, key]; only for small forests."""
        index = np.arange(len(self))
        return (index[None, :] <= index[:, None]) & (index[:, None] < self.subtree_end[None, :])

    def select(self, segment_mask: npt.NDArray[np.bool_], call_indices: Int32Array) -> "Forest":
        """Return the forest of these segments and of the targets of these model calls, whose indices must be sorted.

        The mask must include the ancestors of each segment and every token of the targets.
        """
        table = self.segments
        edges = np.flatnonzero(np.diff(segment_mask, prepend=False, append=False))
        starts = table["start"][edges[::2]]  # adjacent segments form one slice of the layout
        stops = (table["start"] + table["length"])[edges[1::2] - 1]
        shift = np.cumsum(stops - starts, dtype=np.int32) - stops

        def shift_indices(indices: npt.NDArray[Any]) -> Int32Array:
            return indices + shift[np.searchsorted(starts, indices, "right") - 1]

        def take_tokens(array: Int32Array) -> Int32Array:
            return np.concatenate([array[a:b] for a, b in zip(starts.tolist(), stops.tolist())])

        order = np.cumsum(segment_mask, dtype=np.int32) - segment_mask
        segments = table[segment_mask]
        segments["start"] = shift_indices(segments["start"])
        segments["subtree_stop"] = np.append(order, len(segments))[segments["subtree_stop"]]
        segments["parent"] = np.where(segments["parent"] >= 0, order[segments["parent"]], -1)
        first = np.searchsorted(self.targets.call, call_indices)
        stop = np.searchsorted(self.targets.call, call_indices, "right")
        counts = stop - first
        is_contiguous = np.array_equal(first[1:], stop[:-1])  # the usual case, in which a view is enough
        entries = self.targets.select(slice(first[0], stop[-1]) if is_contiguous else concat_ranges(first, counts))
        media_segments = np.searchsorted(table["start"], [item.start for item in self.media], "right") - 1
        media = [item for item, kept in zip(self.media, np.append(segment_mask, False)[media_segments]) if kept]
        return Forest(
            token_ids=take_tokens(self.token_ids),
            position_ids=take_tokens(self.position_ids),
            subtree_end=compute_subtree_ends(segments),
            targets=replace(
                entries,
                token_index=shift_indices(entries.token_index),
                logits_index=shift_indices(entries.logits_index),
                call=np.repeat(np.arange(len(call_indices), dtype=np.int32), counts),
            ),
            calls=self.calls[call_indices],
            segments=segments,
            traces=self.traces,
            envs=self.envs,
            versions=self.versions,
            media=tuple(
                MediaSpan(int(start), int(start) + item.stop - item.start, item.media)
                for item, start in zip(media, shift_indices(np.array([item.start for item in media], np.int32)))
            ),
        )


def compute_subtree_ends(segments: StructuredArray) -> Int32Array:
    """Return `subtree_end` of each token; it is the same for all tokens of a segment."""
    stops = segments["start"] + segments["length"]
    return np.repeat(stops[segments["subtree_stop"] - 1], segments["length"])


def make_padding_forest(length: int) -> Forest:
    """Return padding: tokens that see only themselves. A rank without a pack computes a forest of nothing else."""
    zeros = np.zeros(length, np.int32)
    subtree_end = np.arange(1, length + 1, dtype=np.int32)
    return Forest(zeros, zeros, subtree_end, Targets.empty(), np.empty(0, CALL_DTYPE), np.empty(0, SEGMENT_DTYPE))


def concat_forests(forests: Sequence[Forest]) -> Forest:
    """Return one forest of all trees: no token of one forest sees a token of another."""
    if len(forests) < 2:
        return forests[0] if forests else make_padding_forest(0)
    traces, envs, versions = _Interner(), _Interner(), _Interner()
    targets: list[Targets] = []
    calls: list[StructuredArray] = []
    segments: list[StructuredArray] = []
    subtree_ends: list[Int32Array] = []
    media: list[MediaSpan] = []
    token_offset = call_offset = segment_offset = 0
    for forest in forests:
        entries, call_table, table = forest.targets, forest.calls.copy(), forest.segments.copy()
        entries = replace(
            entries,
            token_index=entries.token_index + np.int32(token_offset),
            logits_index=entries.logits_index + np.int32(token_offset),
            call=entries.call + np.int32(call_offset),
            version=versions.renumber(forest.versions, entries.version),
        )
        call_table["trace"] = traces.renumber(forest.traces, call_table["trace"])
        call_table["env"] = envs.renumber(forest.envs, call_table["env"])
        table["start"] += token_offset
        table["subtree_stop"] += segment_offset
        table["parent"] += np.where(table["parent"] >= 0, segment_offset, 0)
        targets.append(entries)
        calls.append(call_table)
        segments.append(table)
        subtree_ends.append(forest.subtree_end + np.int32(token_offset))
        media += [MediaSpan(m.start + token_offset, m.stop + token_offset, m.media) for m in forest.media]
        token_offset += len(forest)
        call_offset += len(call_table)
        segment_offset += len(table)
    return Forest(
        token_ids=np.concatenate([forest.token_ids for forest in forests]),
        position_ids=np.concatenate([forest.position_ids for forest in forests]),
        subtree_end=np.concatenate(subtree_ends),
        targets=Targets.concat(targets),
        calls=concat_tables(calls, CALL_DTYPE),
        segments=concat_tables(segments, SEGMENT_DTYPE),
        traces=tuple(traces.values),
        envs=tuple(envs.values),
        versions=tuple(versions.values),
        media=tuple(media),
        flat_tokens=sum(forest.flat_tokens for forest in forests),
        unique_tokens=sum(forest.unique_tokens for forest in forests),
        dropped=DroppedTargets(
            tuple(call for forest in forests for call in forest.dropped.overlong_calls),
            sum(forest.dropped.num_truncated_tokens for forest in forests),
        ),
    )


class _Interner:
    """Numbers values in order of appearance, so that the tables of several forests become one."""

    def __init__(self) -> None:
        self.values: dict[Any, int] = {}

    def renumber(self, values: Sequence[Any], indices: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return indices into the common table for `indices` into `values`; -1 stays -1."""
        numbers = [self.values.setdefault(value, len(self.values)) for value in values]
        return np.array([*numbers, -1], np.int32)[indices]
