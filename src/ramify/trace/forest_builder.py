"""From the traces of a group to one forest: merge, lay out, list the targets."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ramify.errors import TraceInvalid
from ramify.trace.annotation import AnnotatedTrace
from ramify.trace.columns import Int32Array
from ramify.trace.forest import Forest, MediaSpan, Targets, compute_subtree_ends
from ramify.trace.graph import MessageGraph
from ramify.trace.radix_tree import ROOT, KeyArray, RadixLayout, RadixPosition, RadixTree
from ramify.trace.targets import build_targets

MROPE_ARRAY = "position"  # the node array that holds rotary positions of several axes, [tokens, 3]


def build_forest(
    annotated_traces: Sequence[AnnotatedTrace], *, seq_len: int | None = None, overlong: Literal["drop", "cut"] = "drop"
) -> Forest:
    """Merge the traces of one group on equal token prefixes and lay them out depth first.

    A path longer than `seq_len` is dropped with the calls that lie on no shorter path (RL), or loses its end (SFT); the
    forest's `dropped` says what was lost. Tokens behind the last trained one of their path are not laid out.
    """
    given = Counter(sample.trace.id for sample in annotated_traces)
    if twice := [name for name, count in given.items() if count > 1]:
        raise TraceInvalid(f"traces {twice} were given more than once: their targets would count more than once")
    found = build_targets(annotated_traces, seq_len, overlong)
    needed, flat_tokens = _find_trained_extents([sample.trace.graph for sample in annotated_traces], found.targets)
    radix = RadixTree()
    images: dict[tuple[str, bytes], int] = {}
    places = [
        _insert_trace(radix, s.trace.graph, i, stops, images)
        for i, (s, stops) in enumerate(zip(annotated_traces, needed))
    ]
    layout, ids = radix.lay_out([sample.trace.graph.tokens.view for sample in annotated_traces])
    index = [
        _compute_layout_indices(s.trace.graph, layout, ends, stops)
        for s, ends, stops in zip(annotated_traces, places, needed)
    ]
    place = np.concatenate([np.empty(0, np.int32), *index])
    table = layout.segments
    depth = np.repeat(table["depth"] - table["start"], table["length"]) + np.arange(len(ids), dtype=np.int32)
    return Forest(
        token_ids=ids,
        position_ids=_compute_position_ids(annotated_traces, index, depth),
        subtree_end=compute_subtree_ends(table),
        targets=replace(
            found.targets, token_index=place[found.targets.token_index], logits_index=place[found.targets.logits_index]
        ),
        sequences=found.sequences,
        segments=table,
        traces=tuple(sample.trace.id for sample in annotated_traces),
        envs=found.envs,
        versions=found.versions,
        media=_collect_media_spans(annotated_traces, index),
        flat_tokens=flat_tokens,
        dropped=found.dropped,
    )


def _find_trained_extents(graphs: Sequence[MessageGraph], targets: Targets) -> tuple[list[list[int]], int]:
    """Where each run of each trace may stop: behind it nothing is trained, and nothing trained hangs off it.

    Also how many tokens the trained paths have together, each counted whole.
    """
    ends = targets.sequence != np.append(targets.sequence[1:], -1)  # the last target of a node is its deepest
    last = targets.token_index[ends]
    found: list[list[int]] = []
    shift = flat_tokens = 0
    for graph in graphs:
        firsts = [first for first, _ in graph.runs()]
        stops = [graph.token_start(first) for first in firsts]
        mine: list[int] = (last[(last >= shift) & (last < shift + graph.tokens.size)] - shift).tolist()
        owners = [bisect_right(stops, token) - 1 for token in mine]
        for run, token in zip(owners, mine):
            stops[run] = max(stops[run], token + 1)
        forks: dict[int, int] = dict.fromkeys(owners, -1)  # needed runs: where the last one that is needed forks off
        for run in reversed(range(len(firsts))):
            parent = int(graph.nodes.view["parent"][firsts[run]])
            if run not in forks:
                continue
            if stops[run] > forks[run]:
                flat_tokens += graph.run_depth(run) + stops[run] - graph.token_start(firsts[run])
            stops[run] = max(stops[run], forks[run])
            if parent >= 0:
                above = graph.find_run(parent)
                forks[above] = max(forks.get(above, -1), graph.token_stop(parent))
        found.append(stops)
        shift += graph.tokens.size
    return found, flat_tokens


def _insert_trace(
    tree: RadixTree,
    graph: MessageGraph,
    trace_index: int,
    stops: list[int],
    image_numbers: dict[tuple[str, bytes], int],
) -> list[RadixPosition]:
    """Merge what is needed of one trace into the trie; returns where each of its runs ends."""
    keys = _build_merge_keys(graph, image_numbers)
    places: list[RadixPosition] = []
    for run, (first, _) in enumerate(graph.runs()):
        parent = int(graph.nodes.view["parent"][first])
        after = RadixPosition(places[graph.find_run(parent)].segment, graph.run_depth(run)) if parent >= 0 else ROOT
        start = graph.token_start(first)
        places.append(
            tree.insert(after, keys[start : stops[run]], (trace_index, start)) if stops[run] > start else after
        )
    return places


def _build_merge_keys(graph: MessageGraph, image_numbers: dict[tuple[str, bytes], int]) -> KeyArray:
    """What decides a merge: token ids, and at placeholders the image too (its number above the id's 32 bits).

    Runs of one image that differ in length or ids are different images, so that no fork falls inside a run.
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
    """For each token of the trace its index in the layout, -1 where it has none."""
    index = np.full(graph.tokens.size, -1, np.int32)
    for run, (first, _) in enumerate(graph.runs()):
        layout.write_indices(index[graph.token_start(first) : stops[run]], run_ends[run], graph.run_depth(run))
    return index


def _compute_position_ids(
    annotated_traces: Sequence[AnnotatedTrace], layout_indices: list[Int32Array], depth: Int32Array
) -> Int32Array:
    """A token's position is its depth, unless its node brings rotary positions of several axes."""
    found: Int32Array | None = None
    for sample, places in zip(annotated_traces, layout_indices, strict=True):
        graph = sample.trace.graph
        for node, arrays in graph.arrays.items():
            if MROPE_ARRAY in arrays:
                if arrays[MROPE_ARRAY].shape != (graph.token_stop(node) - graph.token_start(node), 3):
                    raise TraceInvalid(
                        f"arrays.{MROPE_ARRAY} of node {node} of trace {sample.trace.id!r} must be [tokens, 3]"
                    )
                found = np.tile(depth, (3, 1)) if found is None else found
                at = places[graph.token_start(node) : graph.token_stop(node)]
                found[:, at[at >= 0]] = arrays[MROPE_ARRAY][at >= 0].T
    return depth if found is None else found


def _collect_media_spans(
    annotated_traces: Sequence[AnnotatedTrace], layout_indices: list[Int32Array]
) -> tuple[MediaSpan, ...]:
    """Each image of the layout once, in order, however many traces show it there."""
    found: dict[int, MediaSpan] = {}
    for sample, places in zip(annotated_traces, layout_indices, strict=True):
        for start, stop, media in sample.trace.graph.media_spans():
            at = int(places[start])
            if at >= 0:
                found[at] = MediaSpan(at, at + stop - start, media)
    return tuple(found[at] for at in sorted(found))
