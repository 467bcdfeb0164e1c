"""Metrics of a run: every step has them."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.orchestrate import status
from ramify.orchestrate.progress import THROUGHPUT_WINDOW, RunProgress
from ramify.run.store import RunStore
from ramify.run.store.ledger import Ledger
from ramify.run.store.run_log import RunLog
from tests.support.clock import FakeClock
from tests.support.traces import make_group

GROUP: Any = SimpleNamespace(source="words")


@pytest.fixture
def run_log(tmp_path):
    with RunStore.open(tmp_path) as store:
        Ledger.open(store)  # creates the tables
        yield RunLog(store)


def record(progress, *rewards, is_trainable=True):
    progress.record_group(GROUP, make_group(*rewards), is_trainable=is_trainable, fired_by_filter={})


def test_steps_formed_together_all_record_their_reward(run_log):
    progress = RunProgress(run_log)
    record(progress, 1.0, 0.5)
    progress.record_batches({0: [0, 0], 1: [1, 1]})
    record(progress, 0.25, is_trainable=False)
    progress.record_batches({2: [2]})
    run_log.log_event("end of the metrics").result(10)
    rewards = {metric.step: metric.value for metric in run_log.metrics("reward/all/mean")}
    staleness = {metric.step: metric.value for metric in run_log.metrics("staleness/max")}
    assert rewards == {0: 0.75, 1: 0.75, 2: 0.25}
    assert staleness == {0: 0.0, 1: 1.0, 2: 2.0}
    assert progress.reward_history == [0.75, 0.75, 0.25]


def test_reward_is_available_before_the_first_step(run_log):
    progress = RunProgress(run_log)
    assert (progress.mean_reward, progress.trainable_counts) == (None, (0, 0))
    record(progress, 0.5, 0.5, is_trainable=False)
    assert (progress.mean_reward, progress.trainable_counts) == (0.5, (0, 2))
    assert progress.reward_history == []  # only steps count
    record(progress, 1.0, 0.0)
    progress.record_batches({0: [0]})
    record(progress, 1.0, is_trainable=False)
    assert (progress.mean_reward, progress.trainable_counts) == (0.5, (2, 4))  # of the last step alone


def test_throughput_is_recent(run_log):
    clock = FakeClock()
    progress = RunProgress(run_log, clock=clock)
    clock.advance(50.0)  # until the engines are up
    progress.mark_sampling_started()
    clock.advance(2.0)
    record(progress, *[1.0] * 8)
    assert progress.get_throughput()[0] == pytest.approx(4.0)  # not 8 / 52
    for step in range(3):  # a step of 100 s, whose groups are scored in its last second
        clock.advance(100.0)
        record(progress, *[1.0] * 50)
        progress.record_batches({step: [0]})
    clock.advance(30.0)
    assert progress.get_throughput()[0] == pytest.approx(100 / 130)


def test_throughput_of_a_window_does_not_depend_on_when_it_is_read(run_log):
    clock = FakeClock()
    progress = RunProgress(run_log, clock=clock)
    clock.advance(300.0)
    record(progress, *[1.0] * 3)
    clock.advance(2.0)
    assert progress.get_throughput()[0] == 3 / THROUGHPUT_WINDOW
    clock.advance(THROUGHPUT_WINDOW)
    assert progress.get_throughput() == (0.0, 0.0)


def test_metrics_that_are_not_finite_are_returned_as_text(run_log):
    run: Any = SimpleNamespace(run_log=run_log)
    run_log.log_metrics(0, {"grad_norm": math.nan, "loss": math.inf, "lr": 0.5}).result(10)
    metrics = json.loads(json.dumps(status.query_metrics(run, "*"), allow_nan=False))
    values = {row["name"]: str(float(row["value"])) for row in metrics}
    assert values == {"grad_norm": "nan", "loss": "inf", "lr": "0.5"}
