"""The estimators: exact against enumeration, and intervals that know that repetitions are not tasks."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.evals.stats import clustered_mean, ladder, pass_all, pass_at, passes

SAMPLES = st.lists(st.booleans(), min_size=1, max_size=8)


@given(SAMPLES, st.data())
def test_both_are_the_share_of_all_choices_of_k_samples(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    chosen = list(itertools.combinations(samples, k))
    n, c = len(samples), sum(samples)
    assert pass_at(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    assert pass_all(n, c, k) == pytest.approx(sum(map(all, chosen)) / len(chosen))


def test_a_task_with_fewer_samples_than_k_is_left_out():
    rewards = {"a": [1.0, 0.0], "b": [1.0], "c": []}
    at, every = passes(rewards.values(), 2, threshold=1.0)
    assert (at.mean, every.mean, at.tasks) == (1.0, 0.0, 1)
    assert passes(rewards.values(), 3, threshold=1.0) is None
    assert passes(rewards.values(), 1, threshold=1.0)[0].mean == pytest.approx(0.75)


def test_the_threshold_is_what_passes():
    assert passes([[0.7, 0.4]], 1, threshold=0.7)[0].mean == 0.5


def test_repeating_a_sample_adds_nothing_to_what_is_known():
    once = clustered_mean([[0.0], [1.0], [0.5]])
    often = clustered_mean([[0.0] * 100, [1.0] * 100, [0.5] * 100])
    assert often.mean == once.mean
    assert often.error == pytest.approx(once.error)
    assert once.error == pytest.approx(0.5 / math.sqrt(3))


def test_about_95_of_100_intervals_hold_the_truth():
    rng, inside = random.Random(0), 0
    for _ in range(1000):
        chances = [rng.random() for _ in range(40)]
        found = clustered_mean([[float(rng.random() < p) for _ in range(4)] for p in chances]).interval()
        inside += found[0] <= 0.5 <= found[1]
    assert 920 <= inside <= 970


def test_one_task_has_no_interval_and_none_has_no_mean():
    assert clustered_mean([[0.5, 1.0]]).interval() is None
    assert clustered_mean([[], []]) is None
    assert clustered_mean([[1.0], [1.0]]).interval(0, 1) == (1.0, 1.0)


def test_what_is_shown():
    assert ladder(1) == [1]
    assert ladder(6) == [1, 2, 4, 6]
    assert ladder(8) == [1, 2, 4, 8]
    assert ladder(0) == []
