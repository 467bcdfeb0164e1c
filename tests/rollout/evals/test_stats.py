"""Pass rates match enumeration; intervals are clustered by task."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.rollout.evals.stats import (
    clustered_mean,
    estimate_pass_rates,
    pass_at_k,
    pass_hat_k,
    safe_mean,
    student_quantile,
)

SAMPLES = st.lists(st.booleans(), min_size=1, max_size=8)


@given(SAMPLES, st.data())
def test_pass_at_k_and_pass_hat_k_match_enumeration(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    chosen = list(itertools.combinations(samples, k))
    n, c = len(samples), sum(samples)
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, chosen)) / len(chosen))


def test_tasks_with_fewer_than_k_samples_are_ignored():
    rewards = {"a": [1.0, 0.0], "b": [1.0], "c": []}
    at, every = estimate_pass_rates(rewards.values(), 2, threshold=1.0)
    assert (at.mean, every.mean, at.num_tasks) == (1.0, 0.0, 1)
    assert estimate_pass_rates(rewards.values(), 3, threshold=1.0) is None
    assert estimate_pass_rates(rewards.values(), 1, threshold=1.0)[0].mean == pytest.approx(0.75)


def test_threshold_itself_passes():
    assert estimate_pass_rates([[0.7, 0.4]], 1, threshold=0.7)[0].mean == 0.5


def test_repeated_samples_do_not_reduce_the_standard_error():
    once = clustered_mean([[0.0], [1.0], [0.5]])
    often = clustered_mean([[0.0] * 100, [1.0] * 100, [0.5] * 100])
    assert often.mean == once.mean
    assert often.stderr == pytest.approx(once.stderr)
    assert once.stderr == pytest.approx(0.5 / math.sqrt(3))


# (number of tasks, a, b, levels of the reward): pass probabilities are drawn from Beta(a, b), with mean a / (a + b).
COVERAGE = [(40, 1.0, 1.0, 1), (10, 1.0, 1.0, 1), (10, 1.8, 0.2, 1), (20, 1.94, 0.06, 1), (8, 2.4, 0.6, 4)]


@pytest.mark.parametrize(("tasks", "a", "b", "levels"), COVERAGE)
def test_interval_coverage_is_about_95_percent_and_within_the_range(tasks, a, b, levels):
    rng, inside, truth = random.Random(0), 0, a / (a + b)

    def score(chance: float) -> float:
        return sum(rng.random() < chance for _ in range(levels)) / levels

    for _ in range(400):
        chances = [rng.betavariate(a, b) for _ in range(tasks)]
        low, high = clustered_mean([[score(p) for _ in range(4)] for p in chances], 0.0, 1.0).interval()
        assert 0.0 <= low < high <= 1.0
        inside += low <= truth <= high
    assert 0.925 <= inside / 400 <= 0.99


@given(st.lists(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 1.0]), min_size=1, max_size=4), min_size=2, max_size=12))
def test_interval_contains_its_mean_and_scales_with_the_range(groups):
    estimate = clustered_mean(groups, -1.0, 1.0)
    low, high = estimate.interval()
    assert -1.0 <= low <= estimate.mean <= high <= 1.0
    tenfold = clustered_mean([[10 * value for value in group] for group in groups], -10.0, 10.0).interval()
    assert tenfold == pytest.approx((10 * low, 10 * high), abs=1e-9)


def test_interval_without_a_range_is_students():
    low, high = clustered_mean([[0.0], [10.0], [5.0]]).interval()
    assert (low, high) == pytest.approx((5 - 4.3027 * 5 / math.sqrt(3), 5 + 4.3027 * 5 / math.sqrt(3)), rel=1e-3)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (30, 2.042)])
def test_student_quantiles_match_the_tables(freedom, quantile):
    assert student_quantile(freedom) == pytest.approx(quantile, rel=2e-3)


def test_one_task_has_no_interval_and_no_task_has_no_mean():
    assert clustered_mean([[0.5, 1.0]]).interval() is None
    assert clustered_mean([[], []]) is None


def test_ten_passes_of_ten_do_not_prove_that_all_pass():
    low, high = clustered_mean([[1.0]] * 10, 0.0, 1.0).interval()
    assert (low, high) == (pytest.approx(0.661, abs=0.01), 1.0)


def test_mean_and_error_of_huge_values():
    estimate = clustered_mean([[1e300], [-1e300]])
    assert (estimate.mean, estimate.stderr) == (0.0, pytest.approx(1e300))
    assert clustered_mean([[1.7e308], [1.7e308]]).mean == pytest.approx(1.7e308)
    assert safe_mean([1.7e308, 1.7e308]) == pytest.approx(1.7e308)
    assert math.isnan(safe_mean([math.inf, -math.inf]))
