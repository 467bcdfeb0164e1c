"""Segments and chunks of the paths of a forest, and the order in which a recurrent state passes through them.

A recurrent layer or a convolution reads tokens from left to right. Over a forest it reads segments: the first token of
a segment continues from the state after the last token of its parent, which all children of the parent share. In the
backward pass their gradients of that state are added.

A chunk holds up to `size` tokens of a path, counted from its root, and continues the state of the chunk before it. Only
that is sequential: all else is computed for all chunks at once. A fork may lie within a chunk. Then each branch has a
chunk of its own, which repeats the tokens before the fork, so the paths of a forest have the chunks of flat paths.

Chunks are joined to *tracks*, as long as they can be; where several chunks continue the same one, one of them continues
its track, and every other starts a track of its own, in a later *round*. Tracks of a round are computed at the same
time. A tree has few rounds, at most the logarithm of its chunks, even if it has hundreds of levels. Importable without
torch.
"""

from dataclasses import dataclass

import numpy as np

from ramify.trace import Forest
from ramify.trace.columns import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class ForestSegments:
    """Runs of tokens without forks, in the order of the pack; together they hold every token of it once.

    A segment has no child or at least two, so segments are as long as they can be. A run of padding is a root.
    """

    start: Int32Array  # [segments] index of the first token
    stop: Int32Array  # [segments] index after the last token
    parent: Int32Array  # [segments] -1 for a root; a parent comes before its children

    def __len__(self) -> int:
        return len(self.start)

    @classmethod
    def from_forest(cls, forest: Forest) -> "ForestSegments":
        """Merge the segments of a forest that do not fork, and add its padding."""
        table = forest.segments
        num_children = np.bincount(table["parent"][table["parent"] >= 0], minlength=len(table))
        is_first = np.append(num_children, 0)[table["parent"]] != 1  # an only child continues the segment above it
        is_last = np.append(is_first[1:], True)[: len(table)]
        merged_index = np.append(np.cumsum(is_first) - 1, -1)
        parent = merged_index[table["parent"][is_first]]
        start, stop = table["start"][is_first], (table["start"] + table["length"])[is_last]
        gap_start, gap_stop = np.append(0, stop), np.append(start, len(forest))
        is_gap = gap_start < gap_stop
        starts = np.concatenate([start, gap_start[is_gap]])
        order = np.argsort(starts, kind="stable")
        new_index = np.append(np.argsort(order), -1)
        stops = np.concatenate([stop, gap_stop[is_gap]])
        parents = np.concatenate([new_index[parent], np.full(np.count_nonzero(is_gap), -1)])
        return cls(*(array[order].astype(np.int32) for array in (starts, stops, parents)))


@dataclass(frozen=True, slots=True, eq=False)
class ForestChunks:
    """The chunks of a pack and their rows. A row stands for a token; the rows of a chunk follow each other.

    With chunks of 4 tokens, a trunk of the tokens 0 to 5 with the branches 6, 7, 8 and 9, 10 has the chunks
    [0, 1, 2, 3], [4, 5, 6, 7], [8] and [4, 5, 9, 10]. The tokens 4 and 5 have their outputs from the first of their
    rows, in the second chunk. Without repeated tokens, the rows are the tokens of the pack in its order.
    """

    rows: Int32Array  # [rows] the token of each row
    start: Int32Array  # [chunks] index of the first row
    stop: Int32Array  # [chunks] index after the last row
    previous: Int32Array  # [chunks] the chunk before on the path; -1 at a root

    def __len__(self) -> int:
        return len(self.start)

    @classmethod
    def from_segments(cls, segments: ForestSegments, size: int) -> "ForestChunks":
        """Divide each path into chunks; paths share the chunks of a shared prefix."""
        is_parent = np.isin(np.arange(len(segments)), segments.parent)
        lengths, previous = list[int](), list[int]()
        parts = [np.empty(0, np.int32)]
        ends = list[tuple[Int32Array, int]]()  # of each segment: the tokens of its unfinished chunk, the chunk before
        for segment, parent in enumerate(segments.parent.tolist()):
            repeated, last = ends[parent] if parent >= 0 else (parts[0], -1)
            own = np.arange(segments.start[segment], segments.stop[segment], dtype=np.int32)
            tokens = np.concatenate([repeated, own])
            stop = len(tokens) // size * size if is_parent[segment] else len(tokens)
            for first in range(0, stop, size):
                lengths.append(min(size, stop - first))
                previous.append(last)
                last = len(lengths) - 1
            parts.append(tokens[:stop])
            ends.append((tokens[stop:], last))
        stops = np.cumsum(np.array(lengths, np.int32), dtype=np.int32)
        starts = stops - np.array(lengths, np.int32)
        return cls(np.concatenate(parts), starts, stops, np.array(previous, np.int32))

    def group_rows(self) -> tuple[Int32Array, Int32Array]:
        """Return the rows of the first token, of the second, ..., and where the rows of each begin, [tokens + 1]."""
        num_tokens = int(self.rows.max(initial=-1)) + 1
        if len(self.rows) == num_tokens:  # nothing is repeated, and sorting takes a third of the time of all tables
            return self.rows, np.arange(num_tokens + 1, dtype=np.int32)
        order = np.argsort(self.rows, kind="stable")
        first = np.searchsorted(self.rows[order], np.arange(num_tokens + 1))
        return order.astype(np.int32), first.astype(np.int32)

    def compute_depths(self) -> Int32Array:
        """Return how many chunks are above each chunk."""
        depths: list[int] = []
        for previous in self.previous.tolist():
            depths.append(depths[previous] + 1 if previous >= 0 else 0)
        return np.array(depths, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTracks:
    """The tracks of a pack, by round; tracks that begin at the same fork are neighbours.

    The tracks of round 0 begin at roots, every other track at a fork: after a chunk that several chunks continue.
    """

    chunk: Int32Array  # [chunks] the chunks of the first track, of the second, ...
    first: Int32Array  # [tracks + 1] where the chunks of each track begin
    fork: Int32Array  # [tracks] the fork where it begins; -1 at a root
    fork_of_chunk: Int32Array  # [chunks] the fork after a chunk, at which further tracks begin; -1 if there is none
    fork_first: Int32Array  # [forks + 1] the first track of each fork
    round_first: Int32Array  # [rounds + 1] the first track of each round

    @classmethod
    def from_chunks(cls, chunks: ForestChunks) -> "ChunkTracks":
        """Join chunks to tracks: at a fork the chunk with the most chunks below it continues the track."""
        count, previous = len(chunks), chunks.previous.tolist()
        size, successor = [1] * count, [-1] * count  # chunks in the subtree, and the next chunk of the track
        for chunk in range(count - 1, -1, -1):
            if (above := previous[chunk]) < 0:
                continue
            size[above] += size[chunk]
            if successor[above] < 0 or size[chunk] >= size[successor[above]]:  # of equal children the first
                successor[above] = chunk
        rounds, heads = [0] * count, list[int]()
        for chunk in range(count):
            above = previous[chunk]
            continues = above >= 0 and successor[above] == chunk
            rounds[chunk] = 0 if above < 0 else rounds[above] + (not continues)
            if not continues:
                heads.append(chunk)
        heads.sort(key=lambda head: (rounds[head], previous[head]))
        order, first = list[int](), [0]
        for head in heads:
            while head >= 0:
                order.append(head)
                head = successor[head]
            first.append(len(order))
        num_roots = sum(previous[head] < 0 for head in heads)
        fork_chunks = [previous[head] for head in heads[num_roots:]]
        is_new_fork = np.diff(np.array(fork_chunks, np.int64), prepend=-1) != 0
        fork_of_chunk = np.full(count, -1, np.int32)
        fork_of_chunk[np.array(fork_chunks, np.int64)[is_new_fork]] = np.arange(np.count_nonzero(is_new_fork))
        track_rounds = np.array([rounds[head] for head in heads], np.int64)
        arrays = (
            order,
            first,
            np.concatenate([np.full(num_roots, -1), np.cumsum(is_new_fork) - 1]),
            fork_of_chunk,
            np.append(num_roots + np.flatnonzero(is_new_fork), len(heads)),
            np.searchsorted(track_rounds, np.arange(track_rounds.max(initial=-1) + 2)),
        )
        return cls(*(np.asarray(array, np.int32) for array in arrays))


def find_ancestors(segments: ForestSegments, count: int) -> Int32Array:
    """Return the tokens 1, 2, ... `count` before each token on its path, [tokens, count]; -1 before the root."""
    num_tokens = int(segments.stop[-1]) if len(segments) else 0
    before = np.append(np.arange(-1, num_tokens - 1), -1)  # the last entry: nothing is before -1
    before[segments.start] = np.append(segments.stop - 1, -1)[segments.parent]
    columns = [before[:num_tokens]]
    while len(columns) < count:
        columns.append(before[columns[-1]])
    return np.stack(columns, 1).astype(np.int32)
