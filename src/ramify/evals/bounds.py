"""The range that the rewards of rollouts can have, inferred from the scores that were seen.

A reward is any function, and nothing declares its range. Nearly all score from 0 to 1 or from -1 to 1, so a reward
whose scores all lie in one of these ranges is taken to have it. A score outside both means that the range is unknown.
"""

import math
from collections.abc import Iterable

from ramify.store import Row

RANGES = ((0.0, 1.0), (-1.0, 1.0))
ROUNDING = 1e-6
TOTAL = ""  # stands for the reward as a whole, where a row does not say how it is composed

Bounds = tuple[float, float]


def reward_bounds(rows: Iterable[Row]) -> Bounds:
    """Return the least and the most that a rollout's reward can be; infinite where a range is unknown.

    A reward that is not the weighted sum of its parts contradicts the range of that sum, which is then unknown, too.
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
            weights, parts = {TOTAL: 1.0}, {TOTAL: row.reward}
        compositions[row.source, tuple(weights.items())] = None
        for name in weights:
            scores.setdefault((row.source, name), []).append(parts[name])
    totals = [
        _total([(weight, _range(scores[source, name])) for name, weight in weights]) for source, weights in compositions
    ]
    if not totals:
        return -math.inf, math.inf
    low, high = min(low for low, _ in totals), max(high for _, high in totals)
    if min(rewards) < low - ROUNDING or max(rewards) > high + ROUNDING:
        return -math.inf, math.inf
    return low, high


def _range(scores: list[float]) -> Bounds:
    least, most = min(scores), max(scores)
    return next(((low, high) for low, high in RANGES if low <= least and most <= high), (-math.inf, math.inf))


def _total(parts: list[tuple[float, Bounds]]) -> Bounds:
    """The range of the weighted sum; a negative weight turns a range around."""
    ends = [sorted((weight * low, weight * high)) for weight, (low, high) in parts if weight]
    return math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends)
