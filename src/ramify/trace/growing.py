"""From the traces of a group to one forest: merge, lay out, list the targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from ramify.errors import TraceInvalid
from ramify.trace.annotation import Sample
from ramify.trace.columns import Ints
from ramify.trace.forest import Forest, MediaSpan, subtree_ends
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
    radix = Radix()
    images: dict[tuple[str, bytes], int] = {}
    places = [_insert(radix, sample.trace.graph, number, images) for number, sample in enumerate(samples)]
    layout, ids = radix.layout([sample.trace.graph.tokens.view for sample in samples])
    index = [_indices(sample.trace.graph, layout, ends) for sample, ends in zip(samples, places, strict=True)]
    found = find_targets(samples, np.concatenate([np.empty(0, np.int32), *index]), ids, seq_len, overlong)
    table = layout.table
    depth = np.repeat(table["depth"] - table["start"], table["length"]) + np.arange(len(ids), dtype=np.int32)
    forest = Forest(
        ids=ids,
        position=_positions(samples, index, depth),
        end=subtree_ends(table),
        targets=found.targets,
        sequences=found.sequences,
        segments=table,
        traces=tuple(sample.trace.id for sample in samples),
        envs=found.envs,
        versions=found.versions,
        media=_media(samples, index),
        dropped=found.dropped,
    )
    kept = _needed(forest)
    return forest if np.array_equal(kept, table["length"]) else replace(forest.select(kept), dropped=found.dropped)


def _insert(radix: Radix, graph: Graph, number: int, images: dict[tuple[str, bytes], int]) -> list[Place]:
    """Merge one trace into the trie; returns where each of its runs ends."""
    keys = _keys(graph, images)
    places: list[Place] = []
    for run, (first, last) in enumerate(graph.runs()):
        parent = int(graph.nodes.view["parent"][first])
        after = Place(places[graph.run_of(parent)].segment, graph.run_depth(run)) if parent >= 0 else ROOT
        start = graph.start(first)
        places.append(radix.insert(after, keys[start : graph.stop(last)], (number, start)))
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


def _indices(graph: Graph, layout: Layout, places: list[Place]) -> Ints:
    """For each token of the trace its index in the layout."""
    index = np.empty(graph.tokens.size, np.int32)
    for run, ((first, last), place) in enumerate(zip(graph.runs(), places, strict=True)):
        layout.fill(index[graph.start(first) : graph.stop(last)], place, graph.run_depth(run))
    return index


def _positions(samples: Sequence[Sample], index: list[Ints], depth: Ints) -> Ints:
    """A token's position is its depth, unless its node brings rotary positions of several axes."""
    found: Ints | None = None
    for sample, places in zip(samples, index, strict=True):
        graph = sample.trace.graph
        for node, arrays in graph.arrays.items():
            if AXES in arrays:
                found = np.tile(depth, (3, 1)) if found is None else found
                found[:, places[graph.start(node) : graph.stop(node)]] = arrays[AXES].T
    return depth if found is None else found


def _media(samples: Sequence[Sample], index: list[Ints]) -> tuple[MediaSpan, ...]:
    """Each image of the layout once, in order, however many traces show it there."""
    found: dict[int, MediaSpan] = {}
    for sample, places in zip(samples, index, strict=True):
        for start, stop, media in sample.trace.graph.images():
            at = int(places[start])
            found[at] = MediaSpan(at, at + stop - start, media)
    return tuple(found[at] for at in sorted(found))


def _needed(forest: Forest) -> npt.NDArray[np.int32]:
    """How much of each segment is trained or is context of something trained."""
    table = forest.segments
    kept = np.zeros(len(table), np.int32)
    at = forest.targets.index
    owner = np.searchsorted(table["start"], at, "right") - 1
    np.maximum.at(kept, owner, at - table["start"][owner] + 1)
    trained = np.concatenate([[0], np.cumsum(kept > 0)])
    below = trained[table["last"]] > trained[np.arange(len(table)) + 1]
    return np.where(below, table["length"], kept)
