"""Rewards of single turns: their sum is a reward of the rollout, and the trace keeps each of them."""

import ramify as rf
from tests.support.attempts import OneTask, error_names, load_env, run_one, tool_call

REPLIES = [tool_call("look"), tool_call("look"), "42"]


class Stepwise(OneTask):
    @rf.tool
    def look(self) -> str:
        """Look."""
        return "seen"

    @rf.reward
    def right(self, task, trace) -> float:
        return float(task.answer in trace.last_reply)

    @rf.turn_reward(weight=0.5)
    def looked(self, trace) -> list[float | None]:
        return [1.0, None, 0.25]


async def test_turn_rewards_are_stored_and_summed():
    trace = await run_one(load_env(Stepwise), REPLIES)
    assert not trace.errors
    assert trace.rewards == {"right": (1.0, 1.0), "looked": (1.25, 0.5)}
    assert trace.info["turn_rewards"] == {"looked": [1.0, None, 0.25]}
    assert trace.reward == 1.625


async def test_a_turn_reward_must_have_a_value_for_each_turn():
    class Short(Stepwise):
        def looked(self, trace):
            return [1.0]

    class Number(Stepwise):
        def looked(self, trace):
            return 1.0

    for taskset, found in ((Short, "got 1 values"), (Number, "got a float")):
        trace = await run_one(load_env(taskset), REPLIES)
        assert (error_names(trace), trace.rewards["looked"]) == (["EnvironmentFault"], None)
        assert f"looked: expected a number or None for each of 3 turns, {found}" in trace.errors[0].message
