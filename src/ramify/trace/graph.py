"""The message graph: nodes in arrival order, stored by column, and the search for the path a new prompt continues.

Nodes that continue the node before them form a *run*: a chain whose tokens are one slice of the token column. A
conversation without forks is one run, so finding and proving its prefix is one vectorised compare however long it is;
Python works per fork, not per node or token.

    nodes   0 system   1 user   2 reply   3 tool   4 reply      5 reply (a second sample after node 3)
    runs   [0 ........................................... 4]   [5] hanging off node 3
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.errors import TraceCorrupt
from ramify.trace.checks import (
    check_media,
    check_node,
    check_versions,
    decode_record,
    float_row,
    node_array,
    record_bytes,
    rows_of,
    token_ids,
)
from ramify.trace.columns import MEDIA, NODE, VERSION, Column, Ints, common_prefix, frozen
from ramify.trace.message import Call, Media, MediaRef, Message, Record, VersionRun

Placed = Sequence[tuple[int, int, str]]  # media in a token sequence: (start, stop, hash), in order


class Graph:
    """Columns of nodes, tokens, logprobs, records, weight versions and media, plus the runs they form."""

    __slots__ = (
        "_forks",
        "_run_depth",
        "_run_first",
        "arrays",
        "logprobs",
        "media",
        "media_refs",
        "nodes",
        "policies",
        "records",
        "tokens",
        "versions",
    )

    def __init__(self) -> None:
        self.nodes = Column(np.empty(0, NODE))
        self.tokens = Column(np.empty(0, np.int32))
        self.logprobs = Column(np.empty(0, np.float32))
        self.records = Column(np.empty(0, np.uint8))
        self.versions = Column(np.empty(0, VERSION))
        self.media_refs = Column(np.empty(0, MEDIA))
        self.policies: list[str] = []
        self.media: list[Media] = []
        self.arrays: dict[int, dict[str, npt.NDArray[Any]]] = {}
        self._run_first: list[int] = []  # the run's first node
        self._run_depth: list[int] = []  # tokens on the path before the run
        self._forks: dict[int, list[int]] = {}  # run (-1: none) -> runs that hang off one of its nodes

    def __len__(self) -> int:
        return self.nodes.size

    # -- reading ---------------------------------------------------------------------------------------------------

    def start(self, node: int) -> int:
        """Where the node's tokens begin in the token column."""
        return int(self.nodes.view["stop"][node - 1]) if node > 0 else 0

    def stop(self, node: int) -> int:
        return int(self.nodes.view["stop"][node]) if node >= 0 else 0

    def depth(self, node: int) -> int:
        """Tokens on the path before the node."""
        run = self.run_of(node)
        return self._run_depth[run] + self.start(node) - self.start(self._run_first[run])

    def end(self, node: int) -> int:
        """Tokens on the path up to and with the node; 0 for node -1."""
        return self.depth(node) + self.stop(node) - self.start(node) if node >= 0 else 0

    def before(self, node: int) -> int:
        """The token before the node's first on its path, as an index into the token column; -1 if there is none."""
        while node >= 0:
            first = self._run_first[self.run_of(node)]
            if self.start(node) > self.start(first):
                return self.start(node) - 1
            node = int(self.nodes.view["parent"][first])
            if node >= 0 and self.stop(node) > self.start(node):
                return self.stop(node) - 1
        return -1

    def record(self, node: int) -> Record:
        stops = self.nodes.view["record_stop"]
        try:
            return decode_record(self.records.view[stops[node - 1] if node else 0 : stops[node]].data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise TraceCorrupt(f"the message of node {node} cannot be read: {error}") from error

    def version_runs(self, node: int) -> tuple[VersionRun, ...]:
        rows = _rows(self.versions.view, node, node)
        return tuple(VersionRun(self.policies[p], i, s, c) for _, p, i, s, c in rows)

    def refs(self, node: int) -> tuple[MediaRef, ...]:
        return tuple(MediaRef(*row[1:]) for row in _rows(self.media_refs.view, node, node))

    def images(self, first: int = 0, last: int | None = None) -> list[tuple[int, int, Media]]:
        """(start, stop, media) of all media of nodes first to last, placed in the token column."""
        if not self.media_refs.size:
            return []
        rows = _rows(self.media_refs.view, first, len(self) - 1 if last is None else last)
        starts = ((self.start(node), media, start, stop) for node, _, media, start, stop in rows)
        return [(begin + start, begin + stop, self.media[media]) for begin, media, start, stop in starts]

    def runs(self) -> Iterator[tuple[int, int]]:
        """(first, last) node of each run, in arrival order."""
        firsts = [*self._run_first, len(self)]
        return ((first, after - 1) for first, after in pairwise(firsts))

    def run_starts(self) -> Iterator[tuple[int, int]]:
        """(first node, tokens on the path before it) of each run."""
        return zip(self._run_first, self._run_depth)

    def run_of(self, node: int) -> int:
        return bisect_right(self._run_first, node) - 1

    def run_depth(self, run: int) -> int:
        """Tokens on the path before the run."""
        return self._run_depth[run]

    def slices(self, node: int) -> list[slice]:
        """The path's tokens, root first, as slices of the token column: one per run it passes through."""
        found: list[slice] = []
        while node >= 0:
            first = self._run_first[self.run_of(node)]
            found.append(slice(self.start(first), self.stop(node)))
            node = int(self.nodes.view["parent"][first])
        return found[::-1]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`."""
        found: list[int] = []
        while node >= 0:
            first = self._run_first[self.run_of(node)]
            found.extend(range(node, first - 1, -1))
            node = int(self.nodes.view["parent"][first])
        return found[::-1]

    def path_tokens(self, node: int) -> Ints:
        parts = [self.tokens.view[part] for part in self.slices(node)]
        return frozen(parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int32), *parts]))

    def path_images(self, node: int) -> list[tuple[int, int, str]]:
        """(start, stop, hash) of the media on the path to `node`, in tokens of the path."""
        found: list[tuple[int, int, str]] = []
        while node >= 0:
            run = self.run_of(node)
            shift = self._run_depth[run] - self.start(self._run_first[run])
            mine = self.images(self._run_first[run], node)
            found = [(start + shift, stop + shift, media.hash) for start, stop, media in mine] + found
            node = int(self.nodes.view["parent"][self._run_first[run]])
        return found

    def children(self, node: int) -> list[int]:
        """The nodes that continue `node` (-1: the roots), in arrival order."""
        run = self.run_of(node) if node >= 0 else -1
        found = [node + 1] if node >= 0 and node < self._last(run) else []
        forks = (self._run_first[fork] for fork in self._forks.get(run, ()))
        return found + [first for first in forks if self.nodes.view["parent"][first] == node]

    # -- growing ---------------------------------------------------------------------------------------------------

    def add(
        self,
        parent: int,
        message: Message,
        tokens: npt.ArrayLike = (),
        *,
        sampled: tuple[int, int] = (0, 0),
        content: tuple[int, int] = (0, 0),
        logprobs: npt.ArrayLike = (),
        versions: Sequence[VersionRun] = (),
        media: Sequence[MediaRef] = (),
        arrays: Mapping[str, npt.NDArray[Any]] | None = None,
        call: Call | None = None,
        trainable: bool = True,
    ) -> int:
        """Append a node and return its index; nothing is appended if any part of it is wrong."""
        ids, sampler = token_ids(tokens), float_row(logprobs)
        node, count = len(self), sampled[1] - sampled[0]
        check_node(node, parent, ids, sampled, content, sampler)
        check_versions(node, versions, count)
        check_media(node, media, self.media, len(ids))
        policies = list(dict.fromkeys([*self.policies, *(run.policy for run in versions)]))
        runs = [(node, policies.index(run.policy), run.incarnation, run.step, run.count) for run in versions]
        version_rows = rows_of(runs, VERSION, "versions") if runs else ()
        media_rows = rows_of([(node, *ref) for ref in media], MEDIA, "media") if media else ()
        kept = {name: node_array(name, node, array, len(ids), count) for name, array in (arrays or {}).items()}
        record = record_bytes(message, call)

        self.policies = policies
        self.tokens.extend(ids)
        self.logprobs.extend(sampler)
        self.records.extend(np.frombuffer(record, np.uint8))
        if len(version_rows):
            self.versions.extend(version_rows)
        if len(media_rows):
            self.media_refs.extend(media_rows)
        if kept:
            self.arrays[node] = kept
        stops = (self.tokens.size, self.logprobs.size, self.records.size)
        self.nodes.reserve(1)[0] = (parent, *stops, *sampled, *content, trainable)
        self._extend_runs(node, parent)
        return node

    def index(self, first: int = 0) -> None:
        """Bring the runs up to date with nodes from `first` on that were put into the columns directly."""
        parents = self.nodes.view["parent"]
        if first == 0 and len(self):
            self._extend_runs(0, -1)
        before = np.arange(first - 1, len(self) - 1, dtype=np.int32)
        for node in (np.flatnonzero(parents[first:] != before) + first).tolist():
            self._extend_runs(node, int(parents[node]))

    def retract(self, node: int, media: int) -> None:
        """Take back the nodes from `node` on and the media from `media` on."""
        while self._run_first and self._run_first[-1] >= node:
            parent = int(self.nodes.view["parent"][self._run_first.pop()])
            self._run_depth.pop()
            self._forks[self.run_of(parent) if parent >= 0 else -1].pop()
        for table in (self.versions, self.media_refs):
            table.size = int(np.searchsorted(table.view["node"], node))
        for column, stop in ((self.tokens, "stop"), (self.logprobs, "logprobs_stop"), (self.records, "record_stop")):
            column.size = int(self.nodes.view[stop][node - 1]) if node else 0
        self.arrays = {owner: arrays for owner, arrays in self.arrays.items() if owner < node}
        self.nodes.size = node
        del self.media[media:]

    # -- searching -------------------------------------------------------------------------------------------------

    def match(self, prompt: Ints, placed: Placed = (), after: int = -1) -> tuple[int, int]:
        """The longest path of whole nodes whose tokens and media are an exact prefix of what the engine saw.

        `prompt` holds what follows the path of `after`, and so does the returned length. Returns (node, length); the
        node is the earliest of equals, and never a node without tokens: such nodes carry no evidence in the prompt.
        """
        best, best_length = after, 0
        todo = [(fork, 0) for fork in self._forks.get(-1, ())]
        if after >= 0:
            run = self.run_of(after)
            todo = [(run, self.start(self._run_first[run]) - self.stop(after))]
        tokens: Ints = self.tokens.view
        stops: Ints = self.nodes.view["stop"]
        while todo:
            run, offset = todo.pop()
            first, last = self._run_first[run], self._last(run)
            begin, skip = self.start(first), max(0, -offset)
            same = skip + common_prefix(tokens[begin + skip : int(stops[last])], prompt[offset + skip :])
            if same > skip and (placed or self.media_refs.size):
                same = min(same, self._common_media(first, last, offset, placed))
            whole = bisect_right(stops, begin + same, first, last + 1) - 1
            if whole < first:
                continue
            length = offset + int(stops[whole]) - begin
            node = bisect_left(stops, stops[whole], first, last + 1)
            if length > best_length or (length == best_length > 0 and node < best):
                best, best_length = node, length
            for fork in self._forks.get(run, ()):
                parent = int(self.nodes.view["parent"][self._run_first[fork]])
                if parent <= whole and (after < 0 or parent >= after or run != self.run_of(after)):
                    todo.append((fork, offset + self.stop(parent) - begin))
        return best, best_length

    # -- private ---------------------------------------------------------------------------------------------------

    def _last(self, run: int) -> int:
        return self._run_first[run + 1] - 1 if run + 1 < len(self._run_first) else len(self) - 1

    def _extend_runs(self, node: int, parent: int) -> None:
        if parent == node - 1 and self._run_first:
            return
        self._run_depth.append(self.end(parent))
        self._run_first.append(node)
        self._forks.setdefault(self.run_of(parent) if parent >= 0 else -1, []).append(len(self._run_first) - 1)

    def _common_media(self, first: int, last: int, offset: int, placed: Placed) -> int:
        """How many of the run's tokens may match when equal placeholders must also stand for equal media."""
        begin = self.start(first)
        spans = ((start - begin, stop - begin, media.hash) for start, stop, media in self.images(first, last))
        ours = [span for span in spans if span[0] + offset >= 0]
        theirs = [(start - offset, stop - offset, digest) for start, stop, digest in placed if start >= offset]
        differ = (pair for pair in zip_longest(ours, theirs) if pair[0] != pair[1])
        starts = (min(span[0] for span in pair if span is not None) for pair in differ)
        return next(starts, self.stop(last) - begin)


def _rows(table: npt.NDArray[Any], first: int, last: int) -> list[tuple[int, int, int, int, int]]:
    """The rows of a table that belong to nodes first to last."""
    low, high = np.searchsorted(table["node"], (first, last + 1))
    return table[low:high].tolist()
