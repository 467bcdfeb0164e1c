"""The numbers of a step: every step has them."""

import json
import math
from types import SimpleNamespace
from typing import Any

from ramify.orchestrate import status
from ramify.orchestrate.progress import RunProgress
from ramify.store import open_run
from ramify.store.ledger import Ledger
from ramify.store.run_log import RunLog
from tests.orchestrate.rollouts import rollout


def test_steps_that_one_late_group_decides_together_all_have_their_reward(tmp_path):
    group: Any = SimpleNamespace(source="words")
    with open_run(tmp_path / "run", {"kind": "test"}) as store:
        Ledger.open(store)  # makes the tables
        progress = RunProgress(RunLog(store))
        progress.record_group(group, [rollout("a", 1.0), rollout("b", 0.5)], is_trainable=True, fired_by_filter={})
        progress.record_batches({0: [0, 0], 1: [1, 1]})
        progress.record_group(group, [rollout("c", 0.25)], is_trainable=False, fired_by_filter={})
        progress.record_batches({2: [2]})
    with open_run(tmp_path / "run", {"kind": "test"}) as store:
        journal = RunLog(store)
        rewards = {metric.step: metric.value for metric in journal.metrics("reward/all/mean")}
        ages = {metric.step: metric.value for metric in journal.metrics("staleness/max")}
    assert rewards == {0: 0.75, 1: 0.75, 2: 0.25}
    assert ages == {0: 0.0, 1: 1.0, 2: 2.0}
    assert progress.reward_history == [0.75, 0.75, 0.25]


def test_what_was_judged_before_the_first_step_is_seen_at_once(tmp_path):
    group: Any = SimpleNamespace(source="words")
    with open_run(tmp_path / "run", {"kind": "test"}) as store:
        Ledger.open(store)
        progress = RunProgress(RunLog(store))
        assert (progress.mean_reward, progress.trainable_counts) == (None, (0, 0))
        progress.record_group(group, [rollout("a", 0.5), rollout("b", 0.5)], is_trainable=False, fired_by_filter={})
        assert (progress.mean_reward, progress.trainable_counts) == (0.5, (0, 2))
        assert progress.reward_history == []  # the curve is of steps
        progress.record_group(group, [rollout("c", 1.0), rollout("d", 0.0)], is_trainable=True, fired_by_filter={})
        progress.record_batches({0: [0]})
        progress.record_group(group, [rollout("e", 1.0)], is_trainable=False, fired_by_filter={})
        assert (progress.mean_reward, progress.trainable_counts) == (0.5, (2, 4))  # those of the step


def test_numbers_that_json_has_no_word_for_are_told_all_the_same(tmp_path):
    with open_run(tmp_path / "run", {"kind": "test"}) as store:
        Ledger.open(store)
        run: Any = SimpleNamespace(journal=RunLog(store))
        run.journal.record(0, {"grad_norm": math.nan, "loss": math.inf, "lr": 0.5}).result(10)
        told = json.loads(json.dumps(status.query_metrics(run, "*"), allow_nan=False))
    assert {row["name"]: str(float(row["value"])) for row in told} == {"grad_norm": "nan", "loss": "inf", "lr": "0.5"}
