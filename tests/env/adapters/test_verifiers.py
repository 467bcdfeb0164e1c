"""The adapter of verifiers, without the package. `make test-envs` runs it with the package."""

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import ClassVar

import pytest

import ramify as rf
from ramify.core.errors import ConfigInvalid, ProviderError
from ramify.env import collect_hooks
from ramify.env.adapters.conversation import find_policy_refusal
from ramify.env.adapters.verifiers import NOT_TRAINABLE, Verifiers, VerifiersConfig
from ramify.env.adapters.verifiers.environment import (
    FinishedRollout,
    VerifiersEnvironment,
    add_reward_hooks,
    keep_plain_fields,
    to_plain_row,
)
from ramify.env.adapters.verifiers.v1 import average_scores, find_policy_agents
from ramify.infer.gateway import Gateway
from ramify.rollout import run_attempt
from tests.rollout.test_train_calls import complete
from tests.support.attempts import TASK, load_env, scripted_policy


def test_rewards_and_metrics_become_hooks_by_name():
    taskset = rf.Taskset()
    add_reward_hooks(taskset, {"correct": 1.0, "load": 0.5, "num_turns": 0.0}, from_group=False)
    hooks = collect_hooks(taskset)
    assert {hook.name: hook.weight for hook in hooks.rewards} == {"correct": 1.0, "load_score": 0.5}
    assert [hook.name for hook in hooks.metrics] == ["num_turns"]
    assert not collect_hooks(rf.Taskset()).rewards  # other tasksets have none of them


def test_the_policy_plays_the_agents_without_a_client_of_their_own():
    policy, pinned = SimpleNamespace(client=None), SimpleNamespace(client="elsewhere")
    assert find_policy_agents("kuhn-poker", {"first": policy, "second": policy, "judge": pinned}) == ["first", "second"]
    with pytest.raises(ConfigInvalid, match="every agent of judged has a client of its own"):
        find_policy_agents("judged", {"judge": pinned})


class Duel(VerifiersEnvironment):
    """Stands in for an environment with two agents, of which one is not trained."""

    generation = "v1"
    weights: ClassVar = {"reward": 1.0}
    agents = ("player", "house")

    def iter_tasks(self, split: str) -> Iterator[rf.Task]:
        yield TASK

    async def run(self, task: rf.Task, agents: Sequence[rf.RolloutAgent]) -> list[FinishedRollout]:
        for agent in agents:
            await complete(agent.endpoint, [{"role": "user", "content": f"move, {agent.trace.agent}"}])
        return [
            FinishedRollout("won", {"reward": 2.0}, {"moves": 1.0}),
            FinishedRollout("lost", {"reward": -2.0}, is_trainable=False),
        ]


class DuelsConfig(VerifiersConfig):
    env: str = "duel"


class Duels(Verifiers):
    config: DuelsConfig

    def __init__(self, config: DuelsConfig) -> None:
        super().__init__(config, Duel())


async def test_each_of_several_agents_has_a_trace_with_its_own_scores():
    async with asyncio.timeout(60), Gateway() as gateway:
        policy = scripted_policy(["a", "b"])
        player, house = (await run_attempt(load_env(Duels), TASK, policy=policy, gateway=gateway, id="r1")).traces
    assert [(trace.agent, trace.reward, trace.stop) for trace in (player, house)] == [
        ("player", 2.0, "won"),
        ("house", -2.0, "lost"),
    ]
    assert player.metrics["moves"] == 1.0 and "moves" not in house.metrics
    assert [trace.nodes[trace.sampled_nodes[0]].is_trainable for trace in (player, house)] == [True, False]
    assert house.info["untrained"][0]["reason"] == NOT_TRAINABLE


def test_scores_of_several_runs_of_the_agent_are_averaged():
    traces = [
        SimpleNamespace(
            rewards={"right": SimpleNamespace(score=score), "skipped": None}, metrics={"seconds": 2 * score}
        )
        for score in (0.0, 1.0)
    ]
    assert average_scores(traces) == {"right": 0.5, "seconds": 1.0}


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
