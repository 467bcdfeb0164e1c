"""Metrics of a run: every step has them."""

import json
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.orchestrate import progress as module
from ramify.orchestrate import status
from ramify.orchestrate.progress import RunProgress
from ramify.store import open_run
from ramify.store.ledger import Ledger
from ramify.store.run_log import RunLog
from tests.support.traces import make_trace


def test_steps_formed_together_all_record_their_reward(tmp_path):
    group: Any = SimpleNamespace(source="words")
    with open_run(tmp_path / "run", {"kind": "test"}) as store:
        Ledger.open(store)  # creates the tables
        progress = RunProgress(RunLog(store))
        progress.record_group(
            group, [make_trace("a", 1.0), make_trace("b", 0.5)], is_trainable=True, fired_by_filter={}
        )
        progress.record_batches({0: [0, 0], 1: [1, 1]})
        progress.record_group(group, [make_trace("c", 0.25)], is_trainable=False, fired_by_filter={})
        progress.record_batches({2: [2]})
    with open_run(tmp_path / "run", {"kind": "test"}) as store:
        run_log = RunLog(store)
        rewards = {metric.step: metric.value for metric in run_log.metrics("reward/all/mean")}
        staleness = {metric.step: metric.value for metric in run_log.metrics("staleness/max")}
    assert rewards == {0: 0.75, 1: 0.75, 2: 0.25}
    assert staleness == {0: 0.0, 1: 1.0, 2: 2.0}
    assert progress.reward_history == [0.75, 0.75, 0.25]


def test_reward_is_available_before_the_first_step(tmp_path):
    group: Any = SimpleNamespace(source="words")
    with open_run(tmp_path / "run", {"kind": "test"}) as store:
        Ledger.open(store)
        progress = RunProgress(RunLog(store))
        assert (progress.mean_reward, progress.trainable_counts) == (None, (0, 0))
        progress.record_group(
            group, [make_trace("a", 0.5), make_trace("b", 0.5)], is_trainable=False, fired_by_filter={}
        )
        assert (progress.mean_reward, progress.trainable_counts) == (0.5, (0, 2))
        assert progress.reward_history == []  # only steps count
        progress.record_group(
            group, [make_trace("c", 1.0), make_trace("d", 0.0)], is_trainable=True, fired_by_filter={}
        )
        progress.record_batches({0: [0]})
        progress.record_group(group, [make_trace("e", 1.0)], is_trainable=False, fired_by_filter={})
        assert (progress.mean_reward, progress.trainable_counts) == (0.5, (2, 4))  # those of the last step


def test_throughput_is_recent(tmp_path, monkeypatch):
    group: Any = SimpleNamespace(source="words")
    with open_run(tmp_path / "run", {"kind": "test"}) as store:
        Ledger.open(store)
        progress = RunProgress(RunLog(store))
        clock = [time.monotonic()]
        monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
        clock[0] += 50.0  # until the engines are up
        progress.mark_sampling_started()
        clock[0] += 2.0
        progress.record_group(group, [make_trace("a", 1.0)] * 8, is_trainable=True, fired_by_filter={})
        assert progress.get_throughput()[0] == pytest.approx(4.0)  # not 8 / 52
        for step in range(3):  # a step of 100 s, whose groups are scored in its last second
            clock[0] += 100.0
            progress.record_group(group, [make_trace("a", 1.0)] * 50, is_trainable=True, fired_by_filter={})
            progress.record_batches({step: [0]})
        clock[0] += 30.0
        assert progress.get_throughput()[0] == pytest.approx(100 / 130)


def test_throughput_is_that_of_the_window_whenever_it_is_asked(tmp_path, monkeypatch):
    group: Any = SimpleNamespace(source="words")
    with open_run(tmp_path / "run", {"kind": "test"}) as store:
        Ledger.open(store)
        progress = RunProgress(RunLog(store))
        clock = [time.monotonic() + 300.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
        for number in range(3):
            progress.record_group(group, [make_trace(str(number), 1.0)], is_trainable=True, fired_by_filter={})
        clock[0] += 2.0  # however late in the minute they were scored
        assert progress.get_throughput()[0] == 3 / module.THROUGHPUT_WINDOW
        clock[0] += module.THROUGHPUT_WINDOW
        assert progress.get_throughput() == (0.0, 0.0)


def test_metrics_that_are_not_finite_are_returned_as_text(tmp_path):
    with open_run(tmp_path / "run", {"kind": "test"}) as store:
        Ledger.open(store)
        run: Any = SimpleNamespace(run_log=RunLog(store))
        run.run_log.log_metrics(0, {"grad_norm": math.nan, "loss": math.inf, "lr": 0.5}).result(10)
        metrics = json.loads(json.dumps(status.query_metrics(run, "*"), allow_nan=False))
    assert {row["name"]: str(float(row["value"])) for row in metrics} == {
        "grad_norm": "nan",
        "loss": "inf",
        "lr": "0.5",
    }
