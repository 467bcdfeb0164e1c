"""The merged forest of a group as plain data: its segments, with the advantage of each token.

A segment is a part of the forest without forks. The page draws it once, however many attempts go through it, because
the trainer computes it once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.orchestrate.batches import BatchGroup
from ramify.trace import Annotation, Forest, Trace
from ramify.view.token_view import TokenTexts

MAX_TOKENS = 20_000  # of a forest that is sent token by token; a longer one is sent in bins
MAX_BINS = 200  # per segment

FloatArray = npt.NDArray[np.float64]


def describe_forest(
    group: BatchGroup, attempts: Sequence[Sequence[Trace]], seq_len: int | None, texts: TokenTexts
) -> dict[str, Any]:
    """Return the forest of a group. `attempts` are the traces of each attempt; the page numbers them in this order."""
    forest = group.build_forest([trace for traces in attempts for trace in traces], seq_len)
    numbers = {trace.id: number for number, traces in enumerate(attempts) for trace in traces}
    advantages = _average_advantages(forest)
    segments: list[dict[str, Any]] = []
    for row, members in zip(forest.segments, _find_attempts(forest, numbers)):
        tokens = slice(int(row["start"]), int(row["start"] + row["length"]))
        segment: dict[str, Any] = {name: int(row[name]) for name in ("depth", "length", "parent")}
        segment["attempts"] = members
        if len(forest) > MAX_TOKENS:
            segment["values"] = _bin(advantages[tokens])
        else:
            segment["values"] = [_round(value) for value in advantages[tokens]]
            segment["texts"] = texts.decode(forest.token_ids[tokens].tolist())
        segments.append(segment)
    return {
        "segments": segments,
        "tokens": forest.num_tokens,
        "flat_tokens": forest.flat_tokens,
        "entries": len(forest.targets),
        "overlong": len(forest.dropped.overlong_calls),
        "left_out": sorted(set(numbers.values()) - {numbers[id] for id in forest.traces}),
    }


def annotate_all(
    number: int, source: str, attempts: Sequence[Sequence[Trace]], advantages: Sequence[float | None]
) -> BatchGroup:
    """Return a group with every sampled node annotated, for attempts that are in no batch."""
    annotations = tuple(
        Annotation(trace.id, node, advantage=advantage or 0.0)
        for traces, advantage in zip(attempts, advantages, strict=True)
        for trace in traces
        for node in trace.sampled_nodes
    )
    return BatchGroup(number, source, 1.0, (), annotations)


def _average_advantages(forest: Forest) -> FloatArray:
    """Return the mean advantage of the entries of each token; NaN for tokens that are not trained."""
    indices = forest.targets.token_index
    counts = np.bincount(indices, minlength=len(forest))
    sums = np.bincount(indices, weights=forest.targets.advantage, minlength=len(forest))
    with np.errstate(invalid="ignore"):
        return sums / counts


def _find_attempts(forest: Forest, numbers: dict[str, int]) -> list[list[int]]:
    """Return for each segment the attempts whose trained paths go through it."""
    members: list[set[int]] = [set() for _ in forest.segments]
    owners = np.searchsorted(forest.segments["start"], forest.targets.token_index, "right") - 1
    pairs = set(zip(owners.tolist(), forest.expand_call_column("trace").tolist()))
    for segment, trace in pairs:
        number = numbers[forest.traces[trace]]
        while segment >= 0 and number not in members[segment]:
            members[segment].add(number)
            segment = int(forest.segments["parent"][segment])
    return [sorted(attempts) for attempts in members]


def _bin(values: FloatArray) -> list[float | None]:
    """Return the means of at most MAX_BINS parts; None for a part without a value."""
    parts = np.array_split(values, min(MAX_BINS, max(1, len(values))))
    return [None if np.isnan(part).all() else _round(np.nanmean(part)) for part in parts]


def _round(value: Any) -> float | None:
    return None if np.isnan(value) else float(f"{value:.4g}")
