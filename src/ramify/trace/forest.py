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

from ramify.trace.columns import Floats, Ints, join_tables, ranges
from ramify.trace.message import Media

# One row per model call (or annotated message) that targets come from; `trace` and `env` point into the tables.
SEQUENCE = np.dtype([("trace", "<i4"), ("node", "<i4"), ("env", "<i4"), ("temperature", "<f4")])

# A stretch of layout without forks, in depth-first order: it begins at `start`, `depth` tokens below its root, holds
# `length` tokens, and its subtree is the segments up to but without `last`.
SEGMENT = np.dtype([("start", "<i4"), ("length", "<i4"), ("depth", "<i4"), ("parent", "<i4"), ("last", "<i4")])

Table = npt.NDArray[Any]


class Version(NamedTuple):
    """A version of a policy's weights: a restarted trainer counts steps in a new incarnation."""

    policy: str
    incarnation: int
    step: int


COMPONENTS = ("rl", "ce", "ref_kl")


@dataclass(slots=True, frozen=True, eq=False)
class Targets:
    """One entry per trained (trace, node, token), by column.

    `index` is the token's own place in the layout, `source` that of the token before it on its path, which is not
    always the place before it.
    """

    token: Ints
    index: Ints
    source: Ints
    sequence: Ints  # which model call, a row of `Forest.sequences`
    version: Ints  # which weights, an entry of `Forest.versions`; -1 where none is known
    logprob: Floats  # the sampler's; NaN where only ce applies
    advantage: Floats
    rl: Floats
    ce: Floats
    ref_kl: Floats
    reference: Floats  # the reference model's logprob; NaN where none is known

    def __len__(self) -> int:
        return len(self.token)

    def take(self, chosen: npt.NDArray[np.int64] | slice) -> Targets:
        return Targets(*(getattr(self, name)[chosen] for name in _COLUMNS))

    @classmethod
    def join(cls, parts: Sequence[Targets]) -> Targets:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS))

    @classmethod
    def none(cls) -> Targets:
        ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
        return cls(ints, ints, ints, ints, ints, floats, floats, floats, floats, floats, floats)


_COLUMNS = tuple(entry.name for entry in fields(Targets))


@dataclass(slots=True, frozen=True)
class MediaSpan:
    """An image and the layout indices [start, stop) of its placeholders."""

    start: int
    stop: int
    media: Media


@dataclass(slots=True, frozen=True)
class Dropped:
    """What was left out, by name: calls on paths over `seq_len`, and tokens cut off the end of one."""

    too_long: tuple[tuple[str, int], ...] = ()  # (trace, node)
    cut_tokens: int = 0


@dataclass(slots=True, frozen=True, eq=False)
class Forest:
    """Trees laid out depth first, the targets on them, and the tables the targets point into.

    Targets of one sequence stand together and in order of depth, sequences in the order of their table. The tables of
    names (traces, envs, versions) may hold more than this forest uses.
    """

    ids: Ints
    position: Ints  # [N], or [3, N] where rotary positions have several axes
    end: Ints
    targets: Targets
    sequences: Table
    segments: Table
    traces: tuple[str, ...] = ()
    envs: tuple[str, ...] = ()
    versions: tuple[Version, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    flat_tokens: int = 0  # what the same paths would be, each laid out whole; a tree that is cut tells it once
    dropped: Dropped = field(default_factory=Dropped)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.segments["length"].sum())

    @property
    def pairs(self) -> int:
        """(query, key) pairs that attention computes: key k is seen by end[k] - k queries."""
        return int(self.end.sum(dtype=np.int64)) - len(self) * (len(self) - 1) // 2

    def flops(self, per_token: float, per_pair: float) -> float:
        """The cost of the row for a model that spends so much on a token and on a visible pair."""
        return per_token * len(self) + per_pair * self.pairs

    def counts(self) -> dict[str, int]:
        """N_c: the entries each loss component applies to."""
        return {name: int(np.count_nonzero(getattr(self.targets, name))) for name in COMPONENTS}

    def of_sequence(self, name: str) -> npt.NDArray[Any]:
        """A column of `sequences` (trace, node, env, temperature), one value per target."""
        return self.sequences[name][self.targets.sequence]

    def heads(self) -> tuple[Ints, Ints, npt.NDArray[np.int64]]:
        """The distinct (source, token) pairs the LM head must score, and for each target which one is its own."""
        source, token = self.targets.source, self.targets.token
        joined = source.astype(np.int64) << 32 | token
        if (joined[1:] > joined[:-1]).all():  # trees without forks
            return source, token, np.arange(len(joined))
        # Most stand in order, which a stable sort is quick with; asked for `first`, numpy takes one
        _, first, inverse = np.unique(joined, return_index=True, return_inverse=True)
        return source[first], token[first], inverse

    def visible(self) -> npt.NDArray[np.bool_]:
        """The mask [query, key], for small forests and for reading."""
        index = np.arange(len(self))
        return (index[None, :] <= index[:, None]) & (index[:, None] < self.end[None, :])

    def select(self, chosen: npt.NDArray[np.bool_], calls: Ints) -> Forest:
        """The forest of the chosen segments and of the targets of `calls`, rows of `sequences` in rising order.

        The segments must be closed under ancestors and hold every token of the targets.
        """
        table = self.segments
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        starts = table["start"][edges[::2]]  # neighbouring segments are one stretch of the layout
        stops = (table["start"] + table["length"])[edges[1::2] - 1]
        shift = np.cumsum(stops - starts, dtype=np.int32) - stops

        def moved(at: npt.NDArray[Any]) -> Ints:
            return at + shift[np.searchsorted(starts, at, "right") - 1]

        def kept(array: Ints) -> Ints:
            return np.concatenate([array[..., a:b] for a, b in zip(starts.tolist(), stops.tolist())], axis=-1)

        order = np.cumsum(chosen, dtype=np.int32) - chosen
        segments = table[chosen]
        segments["start"] = moved(segments["start"])
        segments["last"] = np.append(order, len(segments))[segments["last"]]
        segments["parent"] = np.where(segments["parent"] >= 0, order[segments["parent"]], -1)
        first = np.searchsorted(self.targets.sequence, calls)
        after = np.searchsorted(self.targets.sequence, calls, "right")
        counts = after - first
        together = np.array_equal(first[1:], after[:-1])  # most often: then a view does
        entries = self.targets.take(slice(first[0], after[-1]) if together else ranges(first, counts))
        whole = np.append(chosen, False)[np.searchsorted(table["start"], [m.start for m in self.media], "right") - 1]
        media = [item for item, inside in zip(self.media, whole) if inside]
        return Forest(
            ids=kept(self.ids),
            position=kept(self.position),
            end=subtree_ends(segments),
            targets=replace(
                entries,
                index=moved(entries.index),
                source=moved(entries.source),
                sequence=np.repeat(np.arange(len(calls), dtype=np.int32), counts),
            ),
            sequences=self.sequences[calls],
            segments=segments,
            traces=self.traces,
            envs=self.envs,
            versions=self.versions,
            media=tuple(
                MediaSpan(int(at), int(at) + item.stop - item.start, item.media)
                for item, at in zip(media, moved(np.array([item.start for item in media], np.int32)))
            ),
        )


def subtree_ends(segments: Table) -> Ints:
    """`end` of each token: all tokens of a segment have the same subtree behind them."""
    stops = segments["start"] + segments["length"]
    return np.repeat(stops[segments["last"] - 1], segments["length"])


def filler(length: int) -> Forest:
    """Tokens that see only themselves: the padding of a row, or the whole row of a rank that has no pack left."""
    ids = np.zeros(length, np.int32)
    end = np.arange(1, length + 1, dtype=np.int32)
    return Forest(ids, ids, end, Targets.none(), np.empty(0, SEQUENCE), np.empty(0, SEGMENT))


def padded(forest: Forest, length: int) -> Forest:
    """The forest with a filler behind it, `length` tokens in all."""
    more = filler(length - len(forest))
    return replace(
        forest,
        ids=np.concatenate([forest.ids, more.ids]),
        position=_join_positions([forest.position, more.position]),
        end=np.concatenate([forest.end, more.end + np.int32(len(forest))]),
    )


def concat(forests: Sequence[Forest]) -> Forest:
    """Forests side by side in one row: no token of one sees a token of another."""
    if len(forests) < 2:
        return forests[0] if forests else filler(0)
    traces, envs, versions = _Table(), _Table(), _Table()
    targets: list[Targets] = []
    sequences: list[Table] = []
    segments: list[Table] = []
    ends: list[Ints] = []
    media: list[MediaSpan] = []
    tokens = rows = pieces = 0
    for forest in forests:
        entries, calls, table = forest.targets, forest.sequences.copy(), forest.segments.copy()
        entries = replace(
            entries,
            index=entries.index + np.int32(tokens),
            source=entries.source + np.int32(tokens),
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
        ends.append(forest.end + np.int32(tokens))
        media += [MediaSpan(item.start + tokens, item.stop + tokens, item.media) for item in forest.media]
        tokens, rows, pieces = tokens + len(forest), rows + len(calls), pieces + len(table)
    return Forest(
        ids=np.concatenate([forest.ids for forest in forests]),
        position=_join_positions([forest.position for forest in forests]),
        end=np.concatenate(ends),
        targets=Targets.join(targets),
        sequences=join_tables(sequences, SEQUENCE),
        segments=join_tables(segments, SEGMENT),
        traces=tuple(traces.values),
        envs=tuple(envs.values),
        versions=tuple(versions.values),
        media=tuple(media),
        flat_tokens=sum(forest.flat_tokens for forest in forests),
        dropped=Dropped(
            tuple(call for forest in forests for call in forest.dropped.too_long),
            sum(forest.dropped.cut_tokens for forest in forests),
        ),
    )


class _Table:
    """Values numbered in order of appearance, across forests that number them each their own way."""

    def __init__(self) -> None:
        self.values: dict[Any, int] = {}

    def renumber(self, names: Sequence[Any], column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        new = [self.values.setdefault(name, len(self.values)) for name in names]
        return np.array([*new, -1], np.int32)[column]  # -1 stays -1


def _join_positions(parts: list[Ints]) -> Ints:
    """Rows of one-axis and three-axis positions side by side: text counts the same on every axis."""
    axes = max(part.ndim for part in parts)
    if axes == 2:
        parts = [part if part.ndim == 2 else np.broadcast_to(part, (3, len(part))) for part in parts]
    return np.concatenate(parts, axis=-1)
