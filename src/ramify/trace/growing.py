"""From the traces of a group to one forest: merge, lay out, list the targets."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ramify.errors import TraceInvalid
from ramify.trace.annotation import Sample
from ramify.trace.columns import Ints
from ramify.trace.forest import Forest, MediaSpan, Targets, subtree_ends
from ramify.trace.graph import Graph
from ramify.trace.radix import ROOT, Keys, Layout, Place, Radix
from ramify.trace.targets import find_targets

AXES = "position"  # the node array that holds rotary positions of several axes, [tokens, 3]


def grow(samples: Sequence[Sample], *, seq_len: int | None = None, overlong: Literal["drop", "cut"] = "drop") -> Forest:
    """Merge the traces of one group on equal token prefixes and lay them out depth first.

    A path longer than `seq_len` is dropped with the calls that lie on no shorter path (RL), or loses its end (SFT); the
    forest's `dropped` says what was lost. Tokens behind the last trained one of their path are not laid out.
    """
    given = Counter(sample.trace.id for sample in samples)
    if twice := [name for name, count in given.items() if count > 1]:
        raise TraceInvalid(f"traces {twice} were given more than once: their targets would count more than once")
    found = find_targets(samples, seq_len, overlong)
    needed, flat_tokens = _needed([sample.trace.graph for sample in samples], found.targets)
    radix = Radix()
    images: dict[tuple[str, bytes], int] = {}
    places = [_insert(radix, s.trace.graph, i, stops, images) for i, (s, stops) in enumerate(zip(samples, needed))]
    layout, ids = radix.layout([sample.trace.graph.tokens.view for sample in samples])
    index = [_indices(s.trace.graph, layout, ends, stops) for s, ends, stops in zip(samples, places, needed)]
    place = np.concatenate([np.empty(0, np.int32), *index])
    table = layout.table
    depth = np.repeat(table["depth"] - table["start"], table["length"]) + np.arange(len(ids), dtype=np.int32)
    return Forest(
        ids=ids,
        position=_positions(samples, index, depth),
        end=subtree_ends(table),
        targets=replace(found.targets, index=place[found.targets.index], source=place[found.targets.source]),
        sequences=found.sequences,
        segments=table,
        traces=tuple(sample.trace.id for sample in samples),
        envs=found.envs,
        versions=found.versions,
        media=_media(samples, index),
        flat_tokens=flat_tokens,
        dropped=found.dropped,
    )


def _needed(graphs: Sequence[Graph], targets: Targets) -> tuple[list[list[int]], int]:
    """Where each run of each trace may stop: behind it nothing is trained, and nothing trained hangs off it.

    Also how many tokens the trained paths have together, each counted whole.
    """
    ends = targets.sequence != np.append(targets.sequence[1:], -1)  # the last target of a node is its deepest
    last = targets.index[ends]
    found: list[list[int]] = []
    shift = flat_tokens = 0
    for graph in graphs:
        firsts = [first for first, _ in graph.runs()]
        stops = [graph.start(first) for first in firsts]
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
                flat_tokens += graph.run_depth(run) + stops[run] - graph.start(firsts[run])
            stops[run] = max(stops[run], forks[run])
            if parent >= 0:
                above = graph.run_of(parent)
                forks[above] = max(forks.get(above, -1), graph.stop(parent))
        found.append(stops)
        shift += graph.tokens.size
    return found, flat_tokens


def _insert(
    radix: Radix, graph: Graph, number: int, stops: list[int], images: dict[tuple[str, bytes], int]
) -> list[Place]:
    """Merge what is needed of one trace into the trie; returns where each of its runs ends."""
    keys = _keys(graph, images)
    places: list[Place] = []
    for run, (first, _) in enumerate(graph.runs()):
        parent = int(graph.nodes.view["parent"][first])
        after = Place(places[graph.run_of(parent)].segment, graph.run_depth(run)) if parent >= 0 else ROOT
        start = graph.start(first)
        places.append(radix.insert(after, keys[start : stops[run]], (number, start)) if stops[run] > start else after)
    return places


def _keys(graph: Graph, images: dict[tuple[str, bytes], int]) -> Keys:
    """What decides a merge: token ids, and at placeholders the image too (its number above the id's 32 bits).

    Runs of one image that differ in length or ids are different images, so that no fork falls inside a run.
    """
    tokens = graph.tokens.view
    if not graph.media_refs.size:
        return tokens
    keys = tokens.astype(np.int64)
    for start, stop, media in graph.images():
        image = (media.hash, tokens[start:stop].tobytes())
        keys[start:stop] |= (images.setdefault(image, len(images)) + 1) << 32
    return keys


def _indices(graph: Graph, layout: Layout, places: list[Place], stops: list[int]) -> Ints:
    """For each token of the trace its index in the layout, -1 where it has none."""
    index = np.full(graph.tokens.size, -1, np.int32)
    for run, (first, _) in enumerate(graph.runs()):
        layout.fill(index[graph.start(first) : stops[run]], places[run], graph.run_depth(run))
    return index


def _positions(samples: Sequence[Sample], index: list[Ints], depth: Ints) -> Ints:
    """A token's position is its depth, unless its node brings rotary positions of several axes."""
    found: Ints | None = None
    for sample, places in zip(samples, index, strict=True):
        graph = sample.trace.graph
        for node, arrays in graph.arrays.items():
            if AXES in arrays:
                if arrays[AXES].shape != (graph.stop(node) - graph.start(node), 3):
                    raise TraceInvalid(f"arrays.{AXES} of node {node} of trace {sample.trace.id!r} must be [tokens, 3]")
                found = np.tile(depth, (3, 1)) if found is None else found
                at = places[graph.start(node) : graph.stop(node)]
                found[:, at[at >= 0]] = arrays[AXES][at >= 0].T
    return depth if found is None else found


def _media(samples: Sequence[Sample], index: list[Ints]) -> tuple[MediaSpan, ...]:
    """Each image of the layout once, in order, however many traces show it there."""
    found: dict[int, MediaSpan] = {}
    for sample, places in zip(samples, index, strict=True):
        for start, stop, media in sample.trace.graph.images():
            at = int(places[start])
            if at >= 0:
                found[at] = MediaSpan(at, at + stop - start, media)
    return tuple(found[at] for at in sorted(found))
