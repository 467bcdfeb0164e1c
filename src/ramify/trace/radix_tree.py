"""A radix tree that merges token sequences on equal prefixes.

Each segment is a part without forks and refers to the sequence that added it. Sequences are inserted run by run, so the
work in Python is per fork; tokens are compared and copied by numpy.

Keys are token ids, at image placeholders together with the image, so that placeholders of different images fork.
Annotations are not part of the key: two attempts that sampled the same token share it.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.trace.columns import Int32Array, StructuredArray, common_prefix_length
from ramify.trace.forest import SEGMENT_DTYPE

KeyArray = npt.NDArray[Any]


@dataclass(slots=True)
class RadixSegment:
    """A part of the tree without forks: `length` tokens after the first `depth` ones of their path.

    Its tokens are in sequence `sequence_index` from `token_start` on. `parent` is a segment, or ~i for root i.
    `children` maps the first key of each child to its segment.
    """

    parent: int
    depth: int
    length: int
    keys: KeyArray
    sequence_index: int
    token_start: int
    children: dict[int, int]


@dataclass(slots=True, frozen=True)
class RadixPosition:
    """A position in the tree: after `depth` tokens of the path that ends in `segment` or in one of its ancestors.

    At root i, `segment` is ~i.
    """

    segment: int
    depth: int


class RadixTree:
    """Token sequences merged on equal prefixes; those that start at different roots are not merged."""

    def __init__(self) -> None:
        self.segments: list[RadixSegment] = []
        self._root_children: list[dict[int, int]] = []  # by root, each like `RadixSegment.children`

    def add_root(self) -> RadixPosition:
        """Add a root, and return its position."""
        self._root_children.append({})
        return RadixPosition(~(len(self._root_children) - 1), 0)

    def normalize(self, position: RadixPosition) -> RadixPosition:
        """Return the same position, with the segment that holds its last token."""
        index = position.segment
        while index >= 0 and self.segments[index].depth >= position.depth:
            index = self.segments[index].parent
        return RadixPosition(index, position.depth)

    def insert(self, position: RadixPosition, keys: KeyArray, sequence_index: int, token_start: int) -> RadixPosition:
        """Insert `keys` after `position`, and return the position where they end.

        The keys are of the tokens of sequence `sequence_index` from `token_start` on.
        """
        index, depth, done = self.normalize(position).segment, position.depth, 0
        while done < len(keys):
            segment = self.segments[index] if index >= 0 else None
            if segment is not None and depth < segment.depth + segment.length:
                ahead = segment.keys[depth - segment.depth :]
                matched = common_prefix_length(ahead, keys[done:])
                depth, done = depth + matched, done + matched
                if done < len(keys) and matched < len(ahead):
                    index = self._split(index, depth)
                continue
            children = self._get_children(index)
            child = children.get(int(keys[done]))
            if child is None:
                child = len(self.segments)
                children[int(keys[done])] = child
                length = len(keys) - done
                self.segments.append(
                    RadixSegment(index, depth, length, keys[done:], sequence_index, token_start + done, {})
                )
                depth, done = depth + length, len(keys)
            index = child
        return RadixPosition(index, depth)

    def _get_children(self, index: int) -> dict[int, int]:
        """Return the children of a segment or, for ~i, of root i."""
        return self.segments[index].children if index >= 0 else self._root_children[~index]

    def _split(self, index: int, depth: int) -> int:
        """Split a segment at `depth` and return the upper part; the lower part keeps its index."""
        lower, upper_index = self.segments[index], len(self.segments)
        length = depth - lower.depth
        self._get_children(lower.parent)[int(lower.keys[0])] = upper_index
        upper = replace(lower, length=length, keys=lower.keys[:length], children={int(lower.keys[length]): index})
        self.segments.append(upper)
        lower.parent, lower.depth, lower.length = upper_index, depth, lower.length - length
        lower.keys, lower.token_start = lower.keys[length:], lower.token_start + length
        return upper_index

    def lay_out(self, sequences: list[Int32Array]) -> tuple["RadixLayout", Int32Array]:
        """Return the segments in depth-first order, and their token ids from `sequences`."""
        order: list[int] = []
        subtree_stops: dict[int, int] = {}
        stack = [index for children in self._root_children for index in children.values()][::-1]
        while stack:
            index = stack.pop()
            if index < 0:  # the subtree of ~index is complete
                subtree_stops[~index] = len(order)
                continue
            order.append(index)
            stack.append(~index)
            stack.extend(reversed(self.segments[index].children.values()))
        table = np.zeros(len(order), SEGMENT_DTYPE)
        rows = {index: row for row, index in enumerate(order)}
        segments = [self.segments[index] for index in order]
        table["length"] = [segment.length for segment in segments]
        table["depth"] = [segment.depth for segment in segments]
        table["parent"] = [rows.get(segment.parent, -1) for segment in segments]
        table["subtree_stop"] = [subtree_stops[index] for index in order]
        table["start"] = np.cumsum(table["length"]) - table["length"]
        parts = [sequences[s.sequence_index][s.token_start : s.token_start + s.length] for s in segments]
        starts = np.zeros(len(order), np.int32)
        starts[order] = table["start"]
        return RadixLayout(self, table, starts), np.concatenate(parts) if parts else np.empty(0, np.int32)


@dataclass(slots=True, frozen=True)
class RadixLayout:
    """The depth-first layout of a tree; `segment_starts` holds by segment index where it starts in the layout."""

    tree: RadixTree
    segments: StructuredArray
    segment_starts: Int32Array

    def write_indices(self, out: Int32Array, position: RadixPosition, depth: int) -> None:
        """Write into `out` the layout indices of the path's tokens from `depth` up to `position`."""
        index, stop = self.tree.normalize(position).segment, position.depth
        while stop > depth:
            segment = self.tree.segments[index]
            start = max(segment.depth, depth)
            offset = int(self.segment_starts[index]) - segment.depth
            out[start - depth : stop - depth] = np.arange(offset + start, offset + stop, dtype=np.int32)
            index, stop = segment.parent, start
