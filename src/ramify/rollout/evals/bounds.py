"""The range of possible rewards, inferred from the scores of the rollouts.

A reward is an arbitrary function that does not declare its range. Nearly all rewards lie in 0 to 1 or in -1 to 1, so a
reward whose scores all lie in one of these ranges is assumed to have it. If a score lies outside both, the range is
unknown.
"""

import math
from collections.abc import Iterable

from ramify.run.store import RolloutRecord

KNOWN_RANGES = ((0.0, 1.0), (-1.0, 1.0))
TOLERANCE = 1e-6
TOTAL_NAME = ""  # stands for the total reward in rows that do not store its parts

Bounds = tuple[float, float]


def reward_bounds(rows: Iterable[RolloutRecord]) -> Bounds:
    """Return the lowest and the highest possible reward of a rollout; infinite if they are unknown.

    They are also unknown if a reward lies outside the range of the weighted sum of its parts.
    """
    scores: dict[tuple[str, str], list[float]] = {}
    compositions: dict[tuple[str, tuple[tuple[str, float], ...]], None] = {}
    rewards: list[float] = []
    for row in rows:
        if row.failure is not None or row.reward is None:
            continue
        rewards.append(row.reward)
        weights, parts = row.summary.get("weights"), row.summary.get("rewards", {})
        if not weights:
            weights, parts = {TOTAL_NAME: 1.0}, {TOTAL_NAME: row.reward}
        compositions[row.source, tuple(weights.items())] = None
        for name in weights:
            scores.setdefault((row.source, name), []).append(parts[name])
    totals = [
        _sum_ranges([(weight, _infer_range(scores[source, name])) for name, weight in weights])
        for source, weights in compositions
    ]
    if not totals:
        return -math.inf, math.inf
    low, high = min(low for low, _ in totals), max(high for _, high in totals)
    if min(rewards) < low - TOLERANCE or max(rewards) > high + TOLERANCE:
        return -math.inf, math.inf
    return low, high


def _infer_range(scores: list[float]) -> Bounds:
    lowest, highest = min(scores), max(scores)
    return next(((low, high) for low, high in KNOWN_RANGES if low <= lowest and highest <= high), (-math.inf, math.inf))


def _sum_ranges(weighted_ranges: list[tuple[float, Bounds]]) -> Bounds:
    """Return the range of the weighted sum; a negative weight swaps the ends of a range."""
    ends = [sorted((weight * low, weight * high)) for weight, (low, high) in weighted_ranges if weight]
    return math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends)
