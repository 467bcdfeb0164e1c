"""Builds one forest from traces: merges them on equal token prefixes, lays them out and lists the targets."""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ramify.core.errors import OperationInvalid
from ramify.trace.annotation import AnnotatedTrace
from ramify.trace.columns import Int32Array
from ramify.trace.forest import Forest, MediaSpan, Targets, compute_subtree_ends
from ramify.trace.graph import MessageGraph
from ramify.trace.radix_tree import KeyArray, RadixLayout, RadixPosition, RadixTree
from ramify.trace.targets import build_targets
from ramify.trace.trace import Trace

MROPE_ARRAY = "position"  # the node array with rotary positions of several axes, [tokens, 3]


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
        position_ids=_compute_position_ids(
            traces, layout_indices, start_depths + np.arange(len(token_ids), dtype=np.int32)
        ),
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


def _compute_position_ids(traces: Sequence[Trace], layout_indices: list[Int32Array], depths: Int32Array) -> Int32Array:
    """Return the tokens' depths, with three axes where nodes have rotary positions of several axes."""
    position_ids: Int32Array | None = None
    for trace, indices in zip(traces, layout_indices, strict=True):
        graph = trace.graph
        for node, arrays in graph.arrays.items():
            if MROPE_ARRAY in arrays:
                start, stop = graph.token_start(node), graph.token_stop(node)
                if arrays[MROPE_ARRAY].shape != (stop - start, 3):
                    raise OperationInvalid(
                        f"arrays.{MROPE_ARRAY} of node {node} of trace {trace.id!r} must be [tokens, 3]"
                    )
                position_ids = np.tile(depths, (3, 1)) if position_ids is None else position_ids
                node_indices = indices[start:stop]
                in_layout = node_indices >= 0
                position_ids[:, node_indices[in_layout]] = arrays[MROPE_ARRAY][in_layout].T
    return depths if position_ids is None else position_ids


def _collect_media_spans(graphs: Sequence[MessageGraph], layout_indices: list[Int32Array]) -> tuple[MediaSpan, ...]:
    """Return each image of the layout once, in order, even if several traces share it."""
    spans: dict[int, MediaSpan] = {}
    for graph, indices in zip(graphs, layout_indices, strict=True):
        for start, stop, media in graph.media_spans():
            index = int(indices[start])
            if index >= 0:
                spans[index] = MediaSpan(index, index + stop - start, media)
    return tuple(spans[index] for index in sorted(spans))
