"""Packing trees into rows, and rows onto ranks."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ramify.trace.columns import Int32Array, concat_ranges
from ramify.trace.forest import Forest, concat_forests, make_padding_forest


def pack_trees(trees: Sequence[Forest], max_tokens: int, pad_to_multiple: int = 1) -> list[Forest]:
    """Rows of at most `budget` tokens that hold each tree once (a tree over the budget has a row to itself).

    Each tree goes, the largest first, where it leaves the least room. Rows are padded to a multiple of `bucket`, but
    not beyond the budget.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for tree in sorted(range(len(trees)), key=lambda i: -len(trees[i])):
        size = len(trees[tree])
        best = bisect_left(room, (size, -1))
        if best < len(room):
            left, row = room.pop(best)
        else:
            left, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(tree)
        insort(room, (left - size, row))
    return [_build_pack([trees[i] for i in sorted(row)], max_tokens, pad_to_multiple) for row in rows]


def _build_pack(trees: list[Forest], max_tokens: int, pad_to_multiple: int) -> Forest:
    size = sum(len(tree) for tree in trees)
    padding = -size % pad_to_multiple if size > max_tokens else min(-size % pad_to_multiple, max_tokens - size)
    return concat_forests([*trees, make_padding_forest(padding)] if padding else trees)


def balance_packs(costs: npt.ArrayLike, num_ranks: int) -> Int32Array:
    """Spread packs over ranks: [rank, step] holds pack numbers, -1 where the rank runs a filler.

    Ranks wait for each other, so they run the same number of packs. Packs sorted by cost and dealt in hands of one per
    rank need the fewest steps, and what runs in one step costs about the same; where a few heavy packs make that
    uneven, packs are placed one by one instead, and fillers make up the count.
    """
    cost = np.asarray(costs, np.float64)
    steps = -(-len(cost) // num_ranks)
    dealt = np.full(steps * num_ranks, -1, np.int32)
    dealt[: len(cost)] = np.argsort(-cost, kind="stable")
    alone = np.full((len(cost), num_ranks), -1, np.int32)
    alone[:, 0] = np.arange(len(cost))
    even, free = _assign_by_differencing(cost, dealt.reshape(steps, num_ranks)), _assign_by_differencing(cost, alone)
    loads = [np.bincount(rank, cost, num_ranks).max(initial=0.0) for rank in (even, free)]
    rank = even if loads[0] <= 1.01 * loads[1] else free
    order = np.lexsort((-cost, rank))  # by rank, heaviest first
    counts = np.bincount(rank, minlength=num_ranks)
    table = np.full((num_ranks, int(counts.max())), -1, np.int32)
    table[rank[order], concat_ranges(np.zeros(num_ranks, np.int32), counts)] = order
    return table


def _assign_by_differencing(costs: npt.NDArray[np.float64], rounds: Int32Array) -> Int32Array:
    """The rank of each pack by the largest differencing method, which keeps the packs of one hand on different ranks.

    Two hands at a time are joined, the heaviest sum of one with the lightest of the other, always the two most uneven
    hands, until one is left. Going back down from it, each join tells where its two hands' sums ended up.
    """
    ranks = rounds.shape[1]
    weights = np.append(costs, 0.0)[rounds]  # -1 is no pack and weighs nothing
    sorted_cards = np.argsort(weights, axis=1, kind="stable")
    sums = np.take_along_axis(weights, sorted_cards, axis=1)
    heap = [(float(row[0] - row[-1]), number, row) for number, row in enumerate(sums)]
    heapq.heapify(heap)
    joins: list[tuple[int, int, npt.NDArray[np.intp]]] = []
    while len(heap) > 1:
        (_, left, heavy), (_, right, light) = heapq.heappop(heap), heapq.heappop(heap)
        joined = heavy + light[::-1]
        order = np.argsort(joined)
        joined = joined[order]
        heapq.heappush(heap, (float(joined[0] - joined[-1]), len(rounds) + len(joins), joined))
        joins.append((left, right, order))
    slots = np.empty((len(rounds) + len(joins), ranks), np.int32)  # the rank of each hand's sums, lightest first
    slots[-1:] = np.arange(ranks)
    for number in reversed(range(len(joins))):
        left, right, order = joins[number]
        slots[left, order] = slots[len(rounds) + number]
        slots[right] = slots[left, ::-1]
    found = np.empty(len(costs) + 1, np.int32)
    found[np.take_along_axis(rounds, sorted_cards, axis=1)] = slots[: len(rounds)]
    return found[:-1]
