"""Builds one forest from traces: merges them on equal token prefixes, lays them out and lists the targets.

Sequences are inserted into a radix tree run by run, so the work in Python is per fork; tokens are compared and copied
by numpy. Keys are token ids, at image placeholders together with the image, so that placeholders of different images
fork. Annotations are not part of the key: two attempts that sampled the same token share it.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ramify.core.errors import OperationInvalid
from ramify.trace.annotation import AnnotatedTrace
from ramify.trace.columns import Int32Array, StructuredArray, common_prefix_length
from ramify.trace.forest import SEGMENT_DTYPE, Forest, MediaSpan, Targets, compute_subtree_ends
from ramify.trace.graph import MessageGraph
from ramify.trace.targets import build_targets

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


def build_forest(
    annotated_traces: Sequence[AnnotatedTrace],
    *,
    seq_len: int | None = None,
    overlong: Literal["drop", "cut"] = "drop",
    merge: bool = True,
) -> Forest:
    """Lay out `annotated_traces` depth first, merged on equal token prefixes unless `merge` is false.

    Without merging, the result equals `concat_forests` of one forest per trace.
    With `overlong` "drop", model calls that lie only on paths longer than `seq_len` are dropped (RL); with "cut", such
    paths are truncated (SFT). The forest's `dropped` reports both. Tokens after the last trained one of their path are
    not laid out.
    """
    traces = [annotated.trace for annotated in annotated_traces]
    graphs = [trace.graph for trace in traces]
    if repeated := [id for id, count in Counter(trace.id for trace in traces).items() if count > 1]:
        raise OperationInvalid(f"traces {repeated} are repeated, so their targets would count more than once")
    group = build_targets(annotated_traces, seq_len, overlong)
    extents, flat_tokens = _find_trained_extents(graphs, group.targets)
    tree = RadixTree()
    roots = [tree.add_root()] * len(graphs) if merge else [tree.add_root() for _ in graphs]
    image_numbers: dict[tuple[str, bytes], int] = {}
    run_ends: list[list[RadixPosition]] = []
    for index, (root, graph, stops) in enumerate(zip(roots, graphs, extents)):
        run_ends.append(_insert_trace(tree, root, graph, index, stops, image_numbers))
    layout, token_ids = tree.lay_out([graph.tokens.view for graph in graphs])
    layout_indices = [
        _compute_layout_indices(graph, layout, ends, stops) for graph, ends, stops in zip(graphs, run_ends, extents)
    ]
    all_indices = np.concatenate([np.empty(0, np.int32), *layout_indices])
    segments, targets = layout.segments, group.targets
    start_depths = np.repeat(segments["depth"] - segments["start"], segments["length"])
    return Forest(
        token_ids=token_ids,
        position_ids=start_depths + np.arange(len(token_ids), dtype=np.int32),
        subtree_end=compute_subtree_ends(segments),
        targets=replace(
            targets, token_index=all_indices[targets.token_index], logits_index=all_indices[targets.logits_index]
        ),
        calls=group.calls,
        segments=segments,
        traces=tuple(trace.id for trace in traces),
        envs=group.envs,
        versions=group.versions,
        media=_collect_media_spans(graphs, layout_indices),
        flat_tokens=flat_tokens,
        unique_tokens=len(token_ids),
        dropped=group.dropped,
    )


def _find_trained_extents(graphs: Sequence[MessageGraph], targets: Targets) -> tuple[list[list[int]], int]:
    """Return for each run of each trace where it may stop: after its last trained token and its last needed fork.

    Also return the total number of tokens on the trained paths, without prefix sharing.
    """
    is_last = targets.call != np.append(targets.call[1:], -1)  # the last target of a node is its deepest
    last_tokens: deque[int] = deque(targets.token_index[is_last].tolist())  # in the order of the graphs
    extents: list[list[int]] = []
    offset = flat_tokens = 0
    for graph in graphs:
        run_starts = list(graph.runs())
        stops = [graph.token_start(first) for first, _ in run_starts]
        tokens: list[int] = []
        while last_tokens and last_tokens[0] < offset + graph.tokens.size:
            tokens.append(last_tokens.popleft() - offset)
        runs = [bisect_right(stops, token) - 1 for token in tokens]
        for run, token in zip(runs, tokens):
            stops[run] = max(stops[run], token + 1)
        fork_stops: dict[int, int] = dict.fromkeys(runs, -1)  # by needed run: where its last needed fork starts
        for run, (first, depth) in reversed(list(enumerate(run_starts))):
            if run not in fork_stops:
                continue
            if stops[run] > fork_stops[run]:
                flat_tokens += depth + stops[run] - graph.token_start(first)
            stops[run] = max(stops[run], fork_stops[run])
            parent = int(graph.nodes.view["parent"][first])
            if parent >= 0:
                parent_run = graph.find_run(parent)
                fork_stops[parent_run] = max(fork_stops.get(parent_run, -1), graph.token_stop(parent))
        extents.append(stops)
        offset += graph.tokens.size
    return extents, flat_tokens


def _insert_trace(
    tree: RadixTree,
    root: RadixPosition,
    graph: MessageGraph,
    trace_index: int,
    stops: list[int],
    image_numbers: dict[tuple[str, bytes], int],
) -> list[RadixPosition]:
    """Merge the trained part of one trace into the tree at `root`; return the position at the end of each run."""
    keys = build_merge_keys(graph, image_numbers)
    run_ends: list[RadixPosition] = []
    for run, (first, depth) in enumerate(graph.runs()):
        parent = int(graph.nodes.view["parent"][first])
        position = root
        if parent >= 0:
            position = RadixPosition(run_ends[graph.find_run(parent)].segment, depth)
        start = graph.token_start(first)
        if stops[run] > start:
            position = tree.insert(position, keys[start : stops[run]], trace_index, start)
        run_ends.append(position)
    return run_ends


def build_merge_keys(graph: MessageGraph, image_numbers: dict[tuple[str, bytes], int]) -> KeyArray:
    """Return the keys that are merged on: token ids, at placeholders with the image's number above their 32 bits.

    Placeholders of one image that differ in number or ids count as different images, so that no fork falls inside.
    """
    tokens = graph.tokens.view
    if not graph.media_refs.size:
        return tokens
    keys = tokens.astype(np.int64)
    for start, stop, media in graph.media_spans():
        image = (media.hash, tokens[start:stop].tobytes())
        keys[start:stop] |= (image_numbers.setdefault(image, len(image_numbers)) + 1) << 32
    return keys


def _compute_layout_indices(
    graph: MessageGraph, layout: RadixLayout, run_ends: list[RadixPosition], stops: list[int]
) -> Int32Array:
    """Return for each token of the trace its index in the layout, or -1."""
    indices = np.full(graph.tokens.size, -1, np.int32)
    for run, (first, depth) in enumerate(graph.runs()):
        layout.write_indices(indices[graph.token_start(first) : stops[run]], run_ends[run], depth)
    return indices


def _collect_media_spans(graphs: Sequence[MessageGraph], layout_indices: list[Int32Array]) -> tuple[MediaSpan, ...]:
    """Return each image of the layout once, in order, even if several traces share it."""
    spans: dict[int, MediaSpan] = {}
    for graph, indices in zip(graphs, layout_indices, strict=True):
        for start, stop, media in graph.media_spans():
            index = int(indices[start])
            if index >= 0:
                spans[index] = MediaSpan(index, index + stop - start, media)
    return tuple(spans[index] for index in sorted(spans))
