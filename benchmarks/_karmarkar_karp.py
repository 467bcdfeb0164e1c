"""Karmarkar-Karp partition into k parts, the textbook way, as a yardstick for the balancer.

The largest differencing method: every item starts as a partition of its own, with one loaded part and k - 1 empty ones.
The two partitions whose parts differ most are replaced by one that joins the heaviest part of the first with the
lightest of the second, the second heaviest with the second lightest, and so on, until a single partition is left.
Parts may hold different numbers of items. Written for clarity, independent of the code it is compared with.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import TypeAlias

Part: TypeAlias = tuple[float, list[int]]
"""A load and the indices of the items that make it up."""


def karmarkar_karp(weights: Sequence[float], parts: int) -> list[list[int]]:
    """`parts` lists of indices into `weights` with nearly equal sums, the heaviest first."""
    if parts < 1:
        raise ValueError(f"a partition needs at least one part, not {parts}")
    if any(weight < 0 for weight in weights):
        raise ValueError("weights must not be negative")
    if not weights:
        return [[] for _ in range(parts)]

    # A heap entry is (-spread, tie breaker, parts from heavy to light); the tie breaker keeps the result deterministic.
    order = count()
    heap: list[tuple[float, int, list[Part]]] = []
    for index, weight in enumerate(weights):
        alone: list[Part] = [(weight, [index]), *((0, []) for _ in range(parts - 1))]
        heap.append((_negative_spread(alone), next(order), alone))
    heapq.heapify(heap)

    while len(heap) > 1:
        first = heapq.heappop(heap)[2]
        second = heapq.heappop(heap)[2]
        joined = [(a + b, items + more) for (a, items), (b, more) in zip(first, reversed(second))]
        joined.sort(key=lambda part: part[0], reverse=True)
        heapq.heappush(heap, (_negative_spread(joined), next(order), joined))
    return [items for _, items in heap[0][2]]


def _negative_spread(partition: list[Part]) -> float:
    return partition[-1][0] - partition[0][0]
