"""Merging token sequences on their equal prefixes.

A compressed trie: each segment is a stretch without forks and points into the sequence that brought it. Sequences are
inserted run by run, so the work in Python is per fork; tokens are only compared and copied by numpy.

Keys are token ids, and at image placeholders the id together with the image, so equal placeholders of different images
part. What an algorithm thinks of a token is no key: two attempts that sampled the same token share its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.trace.columns import Int32Array, common_prefix_length
from ramify.trace.forest import SEGMENT_DTYPE, StructuredArray

KeyArray = npt.NDArray[Any]


@dataclass(slots=True)
class RadixSegment:
    parent: int
    depth: int  # tokens on the path before it
    length: int
    keys: KeyArray
    origin: tuple[int, int]  # which sequence's tokens, and from which of them on
    children: dict[int, int]  # by first key


@dataclass(slots=True, frozen=True)
class RadixPosition:
    """A spot in the trie: just after `depth` tokens of the path that ends in `segment` or above it."""

    segment: int
    depth: int


ROOT = RadixPosition(-1, 0)


class RadixTree:
    def __init__(self) -> None:
        self._segments: list[RadixSegment] = []
        self._roots: dict[int, int] = {}

    def normalize(self, position: RadixPosition) -> RadixPosition:
        """The same spot, named by the segment that holds its last token."""
        at = position.segment
        while at >= 0 and self._segments[at].depth >= position.depth:
            at = self._segments[at].parent
        return RadixPosition(at, position.depth)

    def insert(self, position: RadixPosition, keys: KeyArray, origin: tuple[int, int]) -> RadixPosition:
        """Walk `keys` down from a spot, adding what is not there yet; returns where they end."""
        at, depth, done = self.normalize(position).segment, position.depth, 0
        while done < len(keys):
            segment = self._segments[at] if at >= 0 else None
            if segment is not None and depth < segment.depth + segment.length:
                ahead = segment.keys[depth - segment.depth :]
                same = common_prefix_length(ahead, keys[done:])
                depth, done = depth + same, done + same
                if done < len(keys) and same < len(ahead):
                    at = self._split(at, depth)
                continue
            children = segment.children if segment is not None else self._roots
            child = children.get(int(keys[done]))
            if child is None:
                child = len(self._segments)
                children[int(keys[done])] = child
                rest = len(keys) - done
                self._segments.append(RadixSegment(at, depth, rest, keys[done:], (origin[0], origin[1] + done), {}))
                depth, done = depth + rest, len(keys)
            at = child
        return RadixPosition(at, depth)

    def _split(self, index: int, depth: int) -> int:
        """Cut a segment in two at `depth`. The lower part keeps the number, so places below stay where they are."""
        tail, head = self._segments[index], len(self._segments)
        cut = depth - tail.depth
        siblings = self._segments[tail.parent].children if tail.parent >= 0 else self._roots
        siblings[int(tail.keys[0])] = head
        self._segments.append(
            RadixSegment(tail.parent, tail.depth, cut, tail.keys[:cut], tail.origin, {int(tail.keys[cut]): index})
        )
        tail.parent, tail.depth, tail.length = head, depth, tail.length - cut
        tail.keys, tail.origin = tail.keys[cut:], (tail.origin[0], tail.origin[1] + cut)
        return head

    def lay_out(self, sequences: list[Int32Array]) -> tuple[RadixLayout, Int32Array]:
        """Depth-first order: where each segment lies, and the token ids there."""
        order: list[int] = []
        last: dict[int, int] = {}
        todo = list(reversed(self._roots.values()))
        while todo:
            at = todo.pop()
            if at < 0:
                last[~at] = len(order)
                continue
            order.append(at)
            todo.append(~at)
            todo.extend(reversed(self._segments[at].children.values()))
        table = np.zeros(len(order), SEGMENT_DTYPE)
        rank = {at: i for i, at in enumerate(order)}
        found = [self._segments[at] for at in order]
        table["length"] = [segment.length for segment in found]
        table["depth"] = [segment.depth for segment in found]
        table["parent"] = [rank.get(segment.parent, -1) for segment in found]
        table["last"] = [last[at] for at in order]
        table["start"] = np.cumsum(table["length"]) - table["length"]
        origins = ((segment.origin, segment.length) for segment in found)
        parts = [sequences[which][start : start + length] for (which, start), length in origins]
        starts = np.zeros(len(order), np.int32)
        starts[order] = table["start"]
        return RadixLayout(self, table, starts), np.concatenate(parts) if parts else np.empty(0, np.int32)

    def get_segment(self, index: int) -> RadixSegment:
        return self._segments[index]


@dataclass(slots=True, frozen=True)
class RadixLayout:
    tree: RadixTree
    segments: StructuredArray
    segment_starts: Int32Array  # by segment number: where the segment begins in the layout

    def write_indices(self, out: Int32Array, position: RadixPosition, depth: int) -> None:
        """Write into `out` the layout indices of the path's tokens from `depth` up to `place`."""
        at, stop = self.tree.normalize(position).segment, position.depth
        while stop > depth:
            segment = self.tree.get_segment(at)
            low = max(segment.depth, depth)
            first = int(self.segment_starts[at]) - segment.depth
            out[low - depth : stop - depth] = np.arange(first + low, first + stop, dtype=np.int32)
            at, stop = segment.parent, low
