"""The adapter of verifiers, without the package. `make test-envs` runs it with the package."""

from types import SimpleNamespace

import pytest

import ramify as rf
from ramify.core.errors import ConfigInvalid, ProviderError
from ramify.env import collect_hooks
from ramify.env.adapters.refusals import find_policy_refusal
from ramify.env.adapters.verifiers.environment import add_reward_hooks, keep_plain_fields, to_plain_row
from ramify.env.adapters.verifiers.v1 import average_scores, get_only_agent


def test_rewards_and_metrics_become_hooks_by_name():
    taskset = rf.Taskset()
    add_reward_hooks(taskset, {"correct": 1.0, "load": 0.5, "num_turns": 0.0}, from_group=False)
    hooks = collect_hooks(taskset)
    assert {hook.name: hook.weight for hook in hooks.rewards} == {"correct": 1.0, "load_score": 0.5}
    assert [hook.name for hook in hooks.metrics] == ["num_turns"]
    assert not collect_hooks(rf.Taskset()).rewards  # other tasksets have none of them


def test_only_agent_may_have_any_name_and_several_are_refused():
    assert get_only_agent("code-golf", ["golfer"]) == "golfer"
    with pytest.raises(ConfigInvalid, match="kuhn-poker has the agents first, second; expected one"):
        get_only_agent("kuhn-poker", ["first", "second"])


def test_scores_of_several_runs_of_the_agent_are_averaged():
    traces = [
        SimpleNamespace(
            rewards={"right": SimpleNamespace(score=score), "skipped": None}, metrics={"seconds": 2 * score}
        )
        for score in (0.0, 1.0)
    ]
    assert average_scores(traces, {"right": 1.0, "skipped": 1.0, "seconds": 0.0}) == {"right": 0.5, "seconds": 1.0}


def test_group_rewards_become_group_hooks_by_name():
    taskset = rf.Taskset()
    add_reward_hooks(taskset, {"shortest": 1.0}, from_group=True)
    assert [hook.name for hook in collect_hooks(taskset).group_rewards] == ["shortest"]


def test_column_that_is_no_plain_data_is_named():
    assert to_plain_row({"answer": 1, "info": {"a": [1]}}) == {"answer": 1, "info": {"a": [1]}}
    with pytest.raises(ConfigInvalid, match="the column 'image' of the dataset has a object"):
        to_plain_row({"image": object()})
    assert keep_plain_fields({"secret": object(), "guesses": [1]}) == {"guesses": [1]}


def test_limit_is_the_stop_reason_and_other_refusals_are_failures():
    trace = rf.Trace(id="r")
    assert find_policy_refusal(trace) is None
    refusal = {"path": "/v1", "status": 400, "name": "BudgetExceeded", "message": "max_turns", "count": 1}
    trace.info["refusals"] = [refusal]
    assert find_policy_refusal(trace) == "BudgetExceeded"
    trace.info["refusals"] = [refusal, {**refusal, "name": "ProviderError"}]
    with pytest.raises(ProviderError, match="ProviderError"):
        find_policy_refusal(trace)
