"""Assigning packs to ranks: every pack once, equal rounds, loads as even as a Karmarkar-Karp partition."""

import heapq
import os
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.trace import balance_packs

NUM_SEEDS = 3 if os.environ.get("RAMIFY_FULL") else 1


def karmarkar_karp(costs: Sequence[float], ranks: int) -> float:
    """The heaviest of `ranks` parts by the largest differencing method, as the textbook has it."""
    heap = [(-cost, number, [0.0] * (ranks - 1) + [cost]) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    for number in range(len(costs), 2 * len(costs) - 1):
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        sums = sorted(a + b for a, b in zip(first, reversed(second), strict=True))
        heapq.heappush(heap, (sums[0] - sums[-1], number, sums))
    return max(heap[0][2])


def loads(costs, table):
    return np.append(np.asarray(costs, float), 0.0)[table].sum(axis=1)


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9))
def test_every_pack_runs_once_and_ranks_run_equally_many_rounds(costs, ranks):
    table = balance_packs(costs, ranks)
    assert table.dtype == np.int32
    assert table.shape[0] == ranks
    assert sorted(table[table >= 0].tolist()) == list(range(len(costs)))
    assert set(table[table < 0].tolist()) <= {-1}
    if len(costs):
        assert (table >= 0).sum(axis=1).max() == table.shape[1], "a step of fillers alone"


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 9))
def test_padding_is_added_only_for_an_even_load(costs, ranks):
    """More steps than the fewest possible are taken only where they lower the heaviest load."""
    table = balance_packs(costs, ranks)
    fewest = -(-len(costs) // ranks)
    assert table.shape[1] >= fewest
    if table.shape[1] > fewest:
        assert loads(costs, table).max() <= max(karmarkar_karp(costs, ranks), max(costs)) * 1.02


@pytest.mark.parametrize("name", ["equal", "uniform", "uniform from 0", "quadratic"])
def test_equal_packs_need_the_fewest_rounds(name):
    for packs in (512, 500):
        assert balance_packs(COSTS[name](np.random.default_rng(0), packs), 32).shape == (32, 16)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 9))
def test_padding_runs_last_and_packs_of_a_round_cost_alike(costs, ranks):
    table = balance_packs(costs, ranks)
    weights = np.append(np.asarray(costs, float), 0.0)[table]
    assert (np.diff(weights, axis=1) <= 0).all(), "heaviest first, so that what runs together costs about the same"
    assert not ((table[:, :-1] < 0) & (table[:, 1:] >= 0)).any()


def lengths(rng, n):
    return rng.lognormal(7, 1, n).clip(16, 8192)


COSTS = {
    "equal": lambda rng, n: np.ones(n),
    "uniform": lambda rng, n: rng.uniform(1, 2, n),
    "uniform from 0": lambda rng, n: rng.uniform(0, 1, n),
    "exponential": lambda rng, n: rng.exponential(1, n),
    "lognormal 0.5": lambda rng, n: rng.lognormal(0, 0.5, n),
    "lognormal 1": lambda rng, n: rng.lognormal(0, 1, n),
    "lognormal 2": lambda rng, n: rng.lognormal(0, 2, n),
    "pareto": lambda rng, n: rng.pareto(1.5, n) + 1,
    "bimodal": lambda rng, n: np.where(rng.random(n) < 0.5, 10.0, 1.0),
    "few heavy": lambda rng, n: np.where(rng.random(n) < 0.08, 100.0, 1.0) * rng.uniform(0.9, 1.1, n),
    "quadratic": lambda rng, n: (length := rng.uniform(100, 8192, n)) + length**2 / 4000,
    "quadratic lognormal": lambda rng, n: (length := lengths(rng, n)) + length**2 / 4000,
}


@pytest.mark.parametrize("ranks", [32, 7])
@pytest.mark.parametrize("name", COSTS)
def test_loads_are_within_two_percent_of_karmarkar_karp(name, ranks):
    for seed in range(NUM_SEEDS):
        costs = COSTS[name](np.random.default_rng(seed), 512)
        assert loads(costs, balance_packs(costs, ranks)).max() <= 1.02 * karmarkar_karp(costs.tolist(), ranks)
