"""The message graph: nodes in arrival order, stored by column, and the search for the path that a prompt continues.

Nodes whose parent is the node before them form a *run*: a chain whose tokens are one slice of the token column. A
conversation without forks is one run, so matching its prefix is one vectorized comparison; the work in Python is per
fork, not per node or token.

    nodes   0 system   1 user   2 reply   3 tool   4 reply      5 reply (a second sample after node 3)
    runs   [0 ........................................... 4]   [5] a fork after node 3
"""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.core.errors import DataCorrupt
from ramify.trace.columns import (
    MEDIA_DTYPE,
    NODE_DTYPE,
    VERSION_DTYPE,
    Column,
    Int32Array,
    common_prefix_length,
    make_readonly,
)
from ramify.trace.message import Media, MediaRef, Message, ModelCall, NodeRecord, VersionSpan
from ramify.trace.node_checks import (
    as_logprobs,
    as_token_ids,
    build_table,
    check_media,
    check_node,
    check_versions,
    copy_node_array,
    decode_record,
    encode_record,
)

MediaSpans = Sequence[tuple[int, int, str]]  # media in a token sequence: (start, stop, hash), in order of start


class MessageGraph:
    """The columns of a trace (nodes, tokens, logprobs, records, versions, media references) and the runs of its nodes.

    `policies` and `media` are the tables that the versions and media references point into; `arrays` holds the extra
    arrays by node.
    """

    __slots__ = (
        "_finish_reasons",
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
        self.nodes = Column(np.empty(0, NODE_DTYPE))
        self.tokens = Column(np.empty(0, np.int32))
        self.logprobs = Column(np.empty(0, np.float32))
        self.records = Column(np.empty(0, np.uint8))
        self.versions = Column(np.empty(0, VERSION_DTYPE))
        self.media_refs = Column(np.empty(0, MEDIA_DTYPE))
        self.policies: list[str] = []
        self.media: list[Media] = []
        self.arrays: dict[int, dict[str, npt.NDArray[Any]]] = {}
        self._finish_reasons: list[str | None] = []  # of the first nodes, as `finish_reasons` decodes them
        self._run_first: list[int] = []  # first node of each run
        self._run_depth: list[int] = []  # number of tokens on the path before each run
        self._forks: dict[int, list[int]] = {}  # by run (-1: none): the runs that fork from one of its nodes

    def __len__(self) -> int:
        return self.nodes.size

    # -- reading ---------------------------------------------------------------------------------------------------

    def token_start(self, node: int) -> int:
        """Return where the node's tokens start in the token column."""
        return int(self.nodes.view["stop"][node - 1]) if node > 0 else 0

    def token_stop(self, node: int) -> int:
        """Return where the node's tokens end in the token column; 0 for node -1."""
        return int(self.nodes.view["stop"][node]) if node >= 0 else 0

    def depth(self, node: int) -> int:
        """Return the number of tokens on the path before the node."""
        run = self.find_run(node)
        return self._run_depth[run] + self.token_start(node) - self.token_start(self._run_first[run])

    def path_length(self, node: int) -> int:
        """Return the number of tokens on the path, including the node; 0 for node -1."""
        return self.depth(node) + self.token_stop(node) - self.token_start(node) if node >= 0 else 0

    def previous_token_index(self, node: int) -> int:
        """Return the token column's index of the last token on the path before the node, or -1."""
        slices = self.path_slices(int(self.nodes.view["parent"][node]))
        return next((part.stop - 1 for part in reversed(slices) if part.stop > part.start), -1)

    def read_record(self, node: int) -> NodeRecord:
        """Decode the message and call of a node. Raises DataCorrupt."""
        stops = self.nodes.view["record_stop"]
        try:
            return decode_record(self.records.view[stops[node - 1] if node else 0 : stops[node]].data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DataCorrupt(f"the message of node {node} cannot be decoded: {error}") from error

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """Why the model call of each node ended; None for a node without one.

        Records are decoded when they are first needed. Several threads may read this.
        """
        reasons = self._finish_reasons
        if new_nodes := range(len(reasons), len(self)):
            calls = [self.read_record(node).call for node in new_nodes]
            reasons = [*reasons, *(None if call is None else sys.intern(call.finish_reason) for call in calls)]
            self._finish_reasons = reasons
        return reasons

    def version_spans(self, node: int) -> tuple[VersionSpan, ...]:
        """Return the weight versions of the node's sampled tokens."""
        rows = _select_rows(self.versions.view, node, node)
        return tuple(VersionSpan(self.policies[p], i, s, c) for _, p, i, s, c in rows)

    def node_media(self, node: int) -> tuple[MediaRef, ...]:
        """Return the media references of a node."""
        return tuple(MediaRef(*row[1:]) for row in _select_rows(self.media_refs.view, node, node))

    def media_spans(self, first: int = 0, last: int | None = None) -> list[tuple[int, int, Media]]:
        """Return (start, stop, media) of all media of nodes `first` to `last`, as indices into the token column."""
        if not self.media_refs.size:
            return []
        rows = _select_rows(self.media_refs.view, first, len(self) - 1 if last is None else last)
        with_offsets = ((self.token_start(node), media, start, stop) for node, _, media, start, stop in rows)
        return [(offset + start, offset + stop, self.media[media]) for offset, media, start, stop in with_offsets]

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield for each run its first node and the number of tokens on the path before it, in arrival order."""
        return zip(self._run_first, self._run_depth)

    def find_run(self, node: int) -> int:
        """Return the index of the node's run."""
        return bisect_right(self._run_first, node) - 1

    def path_slices(self, node: int) -> list[slice]:
        """Return the slices of the token column that make up the path, root first: one per run."""
        return [slice(self.token_start(first), self.token_stop(last)) for first, last in self._path_runs(node)]

    def path_nodes(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`."""
        return list(chain.from_iterable(range(first, last + 1) for first, last in self._path_runs(node)))

    def path_tokens(self, node: int) -> Int32Array:
        """Return the token ids of the path, including the node; without a copy if the path is one run."""
        parts = [self.tokens.view[part] for part in self.path_slices(node)]
        return make_readonly(parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int32), *parts]))

    def path_media(self, node: int) -> list[tuple[int, int, str]]:
        """Return (start, stop, hash) of the media on the path to `node`, as indices into the path's tokens."""
        path_spans: list[tuple[int, int, str]] = []
        for first, last in self._path_runs(node):
            shift = self.depth(first) - self.token_start(first)
            run_spans = self.media_spans(first, last)
            path_spans += [(start + shift, stop + shift, media.hash) for start, stop, media in run_spans]
        return path_spans

    def children(self, node: int) -> list[int]:
        """Return the children of `node` (-1: the roots), in arrival order."""
        run = self.find_run(node) if node >= 0 else -1
        next_in_run = [node + 1] if node >= 0 and node < self._run_last(run) else []
        forks = (self._run_first[fork] for fork in self._forks.get(run, ()))
        return next_in_run + [first for first in forks if self.nodes.view["parent"][first] == node]

    # -- writing ---------------------------------------------------------------------------------------------------

    def add_node(
        self,
        parent: int,
        message: Message,
        token_ids: npt.ArrayLike = (),
        *,
        sampled_span: tuple[int, int] = (0, 0),
        content_span: tuple[int, int] = (0, 0),
        logprobs: npt.ArrayLike = (),
        versions: Sequence[VersionSpan] = (),
        media: Sequence[MediaRef] = (),
        arrays: Mapping[str, npt.NDArray[Any]] | None = None,
        call: ModelCall | None = None,
        trainable: bool = True,
    ) -> int:
        """Append a node and return its index. If any part of it is invalid, nothing is appended.

        The spans are relative to the node's first token. `logprobs` and `versions` are of the sampled tokens.
        `TraceBuilder` records model calls.
        """
        ids, sampled_logprobs = as_token_ids(token_ids), as_logprobs(logprobs)
        node, num_sampled = len(self), sampled_span[1] - sampled_span[0]
        check_node(node, parent, ids, sampled_span, content_span, sampled_logprobs)
        check_versions(node, versions, num_sampled)
        check_media(node, media, self.media, len(ids))
        policies = list(dict.fromkeys([*self.policies, *(run.policy for run in versions)]))
        runs = [(node, policies.index(run.policy), run.incarnation, run.step, run.count) for run in versions]
        version_rows = build_table(runs, VERSION_DTYPE, "versions") if runs else ()
        media_rows = build_table([(node, *ref) for ref in media], MEDIA_DTYPE, "media") if media else ()
        copies = {
            name: copy_node_array(name, node, array, len(ids), num_sampled) for name, array in (arrays or {}).items()
        }
        record = encode_record(message, call)

        self.policies = policies
        self.tokens.extend(ids)
        self.logprobs.extend(sampled_logprobs)
        self.records.extend(np.frombuffer(record, np.uint8))
        if len(version_rows):
            self.versions.extend(version_rows)
        if len(media_rows):
            self.media_refs.extend(media_rows)
        if copies:
            self.arrays[node] = copies
        stops = (self.tokens.size, self.logprobs.size, self.records.size)
        self.nodes.reserve(1)[0] = (parent, *stops, *sampled_span, *content_span, trainable)
        self._extend_runs(node, parent)
        return node

    def index_runs(self) -> None:
        """Find the runs after the columns were set directly."""
        for node, parent in enumerate(self.nodes.view["parent"].tolist()):
            if parent != node - 1 or node == 0:
                self._extend_runs(node, parent)

    def truncate(self, num_nodes: int, num_media: int) -> None:
        """Remove all nodes but the first `num_nodes`, and all media but the first `num_media`."""
        while self._run_first and self._run_first[-1] >= num_nodes:
            parent = int(self.nodes.view["parent"][self._run_first.pop()])
            self._run_depth.pop()
            self._forks[self.find_run(parent) if parent >= 0 else -1].pop()
        self._finish_reasons = self._finish_reasons[:num_nodes]
        for table in (self.versions, self.media_refs):
            table.size = int(np.searchsorted(table.view["node"], num_nodes))
        for column, stop in ((self.tokens, "stop"), (self.logprobs, "logprobs_stop"), (self.records, "record_stop")):
            column.size = int(self.nodes.view[stop][num_nodes - 1]) if num_nodes else 0
        self.arrays = {node: arrays for node, arrays in self.arrays.items() if node < num_nodes}
        self.nodes.size = num_nodes
        del self.media[num_media:]

    # -- searching -------------------------------------------------------------------------------------------------

    def match_prefix(self, prompt: Int32Array, media_spans: MediaSpans = (), prefix_node: int = -1) -> tuple[int, int]:
        """Return (node, length) of the longest path of complete nodes whose tokens and media are a prefix of `prompt`.

        `prompt` and the returned length exclude the path of `prefix_node`, which is known to match. Of several such
        nodes the earliest is returned, and never one without tokens, which the prompt cannot confirm.
        """
        best, best_length = prefix_node, 0
        candidates = [(fork, 0) for fork in self._forks.get(-1, ())]  # (run, its start in the prompt)
        if prefix_node >= 0:
            run = self.find_run(prefix_node)
            candidates = [(run, self.token_start(self._run_first[run]) - self.token_stop(prefix_node))]
        tokens: Int32Array = self.tokens.view
        stops: Int32Array = self.nodes.view["stop"]
        while candidates:
            run, offset = candidates.pop()
            first, last = self._run_first[run], self._run_last(run)
            start, skip = self.token_start(first), max(0, -offset)
            matched = skip + common_prefix_length(tokens[start + skip : int(stops[last])], prompt[offset + skip :])
            if matched > skip and (media_spans or self.media_refs.size):
                matched = min(matched, self._match_media(first, last, offset, media_spans))
            last_matched = bisect_right(stops, start + matched, first, last + 1) - 1
            if last_matched < first:
                continue
            length = offset + int(stops[last_matched]) - start
            node = bisect_left(stops, stops[last_matched], first, last + 1)
            if length > best_length or (length == best_length > 0 and node < best):
                best, best_length = node, length
            for fork in self._forks.get(run, ()):
                parent = int(self.nodes.view["parent"][self._run_first[fork]])
                if parent > last_matched:
                    continue
                if prefix_node < 0 or parent >= prefix_node or run != self.find_run(prefix_node):
                    candidates.append((fork, offset + self.token_stop(parent) - start))
        return best, best_length

    # -- private ---------------------------------------------------------------------------------------------------

    def _path_runs(self, node: int) -> list[tuple[int, int]]:
        """Return the first and last node of each run's part of the path to `node`, root first."""
        parts: list[tuple[int, int]] = []
        while node >= 0:
            first = self._run_first[self.find_run(node)]
            parts.append((first, node))
            node = int(self.nodes.view["parent"][first])
        return parts[::-1]

    def _run_last(self, run: int) -> int:
        return self._run_first[run + 1] - 1 if run + 1 < len(self._run_first) else len(self) - 1

    def _extend_runs(self, node: int, parent: int) -> None:
        if parent == node - 1 and self._run_first:
            return
        self._run_depth.append(self.path_length(parent))
        self._run_first.append(node)
        self._forks.setdefault(self.find_run(parent) if parent >= 0 else -1, []).append(len(self._run_first) - 1)

    def _match_media(self, first: int, last: int, offset: int, media_spans: MediaSpans) -> int:
        """Return how many of the run's tokens may match if equal placeholders must also have equal media."""
        run_start = self.token_start(first)
        spans = (
            (start - run_start, stop - run_start, media.hash) for start, stop, media in self.media_spans(first, last)
        )
        stored = [span for span in spans if span[0] + offset >= 0]
        prompted = [(start - offset, stop - offset, digest) for start, stop, digest in media_spans if start >= offset]
        differences = (pair for pair in zip_longest(stored, prompted) if pair[0] != pair[1])
        starts = (min(span[0] for span in pair if span is not None) for pair in differences)
        return next(starts, self.token_stop(last) - run_start)


def _select_rows(table: npt.NDArray[Any], first: int, last: int) -> list[tuple[int, int, int, int, int]]:
    """Return the rows of a table that belong to nodes `first` to `last`."""
    start, stop = np.searchsorted(table["node"], (first, last + 1))
    return table[start:stop].tolist()
