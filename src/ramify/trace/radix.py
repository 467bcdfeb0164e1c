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

from ramify.trace.columns import Ints, common_prefix
from ramify.trace.forest import SEGMENT, Table

Keys = npt.NDArray[Any]


@dataclass(slots=True)
class Segment:
    parent: int
    depth: int  # tokens on the path before it
    length: int
    keys: Keys
    origin: tuple[int, int]  # which sequence's tokens, and from which of them on
    children: dict[int, int]  # by first key


@dataclass(slots=True, frozen=True)
class Place:
    """A spot in the trie: just after `depth` tokens of the path that ends in `segment` or above it."""

    segment: int
    depth: int


ROOT = Place(-1, 0)


class Radix:
    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._roots: dict[int, int] = {}

    def locate(self, place: Place) -> Place:
        """The same spot, named by the segment that holds its last token."""
        at = place.segment
        while at >= 0 and self._segments[at].depth >= place.depth:
            at = self._segments[at].parent
        return Place(at, place.depth)

    def insert(self, after: Place, keys: Keys, origin: tuple[int, int]) -> Place:
        """Walk `keys` down from a spot, adding what is not there yet; returns where they end."""
        at, depth, done = self.locate(after).segment, after.depth, 0
        while done < len(keys):
            segment = self._segments[at] if at >= 0 else None
            if segment is not None and depth < segment.depth + segment.length:
                ahead = segment.keys[depth - segment.depth :]
                same = common_prefix(ahead, keys[done:])
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
                self._segments.append(Segment(at, depth, rest, keys[done:], (origin[0], origin[1] + done), {}))
                depth, done = depth + rest, len(keys)
            at = child
        return Place(at, depth)

    def _split(self, at: int, depth: int) -> int:
        """Cut a segment in two at `depth`. The lower part keeps the number, so places below stay where they are."""
        tail, head = self._segments[at], len(self._segments)
        cut = depth - tail.depth
        siblings = self._segments[tail.parent].children if tail.parent >= 0 else self._roots
        siblings[int(tail.keys[0])] = head
        self._segments.append(
            Segment(tail.parent, tail.depth, cut, tail.keys[:cut], tail.origin, {int(tail.keys[cut]): at})
        )
        tail.parent, tail.depth, tail.length = head, depth, tail.length - cut
        tail.keys, tail.origin = tail.keys[cut:], (tail.origin[0], tail.origin[1] + cut)
        return head

    def layout(self, sequences: list[Ints]) -> tuple[Layout, Ints]:
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
        table = np.zeros(len(order), SEGMENT)
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
        return Layout(self, table, starts), np.concatenate(parts) if parts else np.empty(0, np.int32)

    def segment(self, at: int) -> Segment:
        return self._segments[at]


@dataclass(slots=True, frozen=True)
class Layout:
    radix: Radix
    table: Table
    starts: Ints  # by segment number: where the segment begins in the layout

    def fill(self, out: Ints, place: Place, depth: int) -> None:
        """Write into `out` the layout indices of the path's tokens from `depth` up to `place`."""
        at, stop = self.radix.locate(place).segment, place.depth
        while stop > depth:
            segment = self.radix.segment(at)
            low = max(segment.depth, depth)
            first = int(self.starts[at]) - segment.depth
            out[low - depth : stop - depth] = np.arange(first + low, first + stop, dtype=np.int32)
            at, stop = segment.parent, low
