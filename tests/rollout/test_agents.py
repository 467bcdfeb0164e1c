"""Rollouts with several agents: one trace each, scored one by one."""

import asyncio

import ramify as rf
from ramify.infer.gateway import Gateway
from ramify.rollout import run_attempt
from tests.rollout.test_train_calls import complete
from tests.support.attempts import TASK, OneTask, error_names, load_env, scripted_policy


class Duel(OneTask):
    async def run_agent(self, add_agent, state) -> str:
        players = [add_agent(name) for name in ("first", "second")]
        for number in range(2):
            for player in players:
                await complete(player.endpoint, [{"role": "user", "content": f"move {number}"}])
        state.winner = "second"
        return "over"

    @rf.reward
    def won(self, trace, state) -> float:
        return float(trace.agent == state.winner)


class Twins(OneTask):
    async def run_agent(self, add_agent) -> str:
        add_agent("same")
        add_agent("same")
        return "over"


async def play(taskset: type[rf.Taskset]) -> tuple[rf.Trace, ...]:
    async with asyncio.timeout(60), Gateway() as gateway:
        policy = scripted_policy(["a", "b", "c", "d"])
        return (await run_attempt(load_env(taskset), TASK, policy=policy, gateway=gateway, id="r1")).traces


async def test_each_agent_has_a_trace_and_a_reward_of_its_own():
    first, second = await play(Duel)
    assert (first.id, first.agent, second.agent) == ("r1", "first", "second")
    assert first.episode == second.episode == "r1" and second.id != first.id
    assert [(trace.stop, trace.reward) for trace in (first, second)] == [("over", 0.0), ("over", 1.0)]
    for trace in (first, second):
        replies = [node for node in trace.nodes if node.message.role == "assistant"]
        assert len(replies) == 2 and all(node.is_trainable and len(node.logprobs) for node in replies)
    assert not trace.info.get("untrained")


async def test_two_agents_of_one_name_are_refused():
    (trace,) = await play(Twins)
    assert error_names(trace) == ["EnvironmentFault"]
