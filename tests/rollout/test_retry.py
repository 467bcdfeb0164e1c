"""Again or not: by blame, by name, by number."""

import asyncio

import ramify as rf
from ramify.env import RolloutContext
from ramify.errors import ProviderError
from ramify.rollout import run_rollout, score_group, score_trace
from ramify.trace import Trace
from tests.rollout.stage import TASK, OneTask, attempt, environment, names, policy_of


def rolled(env, script, **options) -> Trace:
    async def once() -> Trace:
        return (await run_rollout(env, TASK, policy=policy_of(script), id="r1", **options)).traces[0]

    return asyncio.run(asyncio.wait_for(once(), 20))


class Failing(OneTask):
    """Its reward raises `failures` times."""

    def __init__(self, config=None) -> None:
        super().__init__(config)
        self.failures = 0
        self.asked = 0

    @rf.reward
    def fickle(self) -> float:
        self.asked += 1
        if self.asked <= self.failures:
            raise OSError("not yet")
        return 1.0


def test_a_reward_that_did_not_run_is_reason_to_run_again():
    env = environment(Failing)
    env.taskset.failures = 1
    trace = rolled(env, ["a", "b"])
    assert trace.reward == 1.0
    assert not trace.errors
    assert len(trace.sampled_nodes) == 1  # the trace of the second run, alone
    assert trace.last_reply == "b"
    assert len(trace.info["tries"]) == 1
    assert "not yet" in trace.info["tries"][0]


def test_attempts_end_and_the_last_one_is_the_result():
    env = environment(Failing, attempts=2)
    env.taskset.failures = 9
    trace = rolled(env, ["a", "b", "c"])
    assert names(trace) == ["EnvironmentFault"]
    assert env.taskset.asked == 2
    assert rolled(env, ["a", "b"], max_tries=1).info == {}


def test_a_failure_of_the_system_is_run_again():
    lost = ProviderError("lost")
    assert rolled(environment(Failing, model_retries=0), [lost, lost, "a"]).reward == 1.0


def test_a_failure_of_the_policy_is_a_result():
    env = environment(Failing, max_input_tokens=2)
    trace = rolled(env, ["a", "b"])
    assert names(trace) == ["BudgetExceeded"]
    assert trace.reward == 1.0
    assert env.taskset.asked == 1


def test_what_another_try_cannot_change_is_not_tried():
    class Wordy(OneTask):
        runs = 0

        @rf.reward
        def wordy(self):
            type(self).runs += 1
            return "very good"

    trace = rolled(environment(Wordy), ["a"] * 3)
    assert names(trace) == ["ValueRefused"]
    assert Wordy.runs == 1


class Ranked(OneTask):
    @rf.group_reward(weight=2.0)
    def shortest(self, traces) -> list[float]:
        least = min(len(trace.last_reply) for trace in traces)
        return [float(len(trace.last_reply) == least) for trace in traces]

    @rf.group_reward
    def odd(self, task, traces, rng) -> list[float]:
        if task.answer == "42" and len(traces) == 1:
            raise ValueError("one is no group")
        return [0.5 for _ in traces]


def test_group_rewards_are_due_until_the_group_is_scored():
    env = environment(Ranked)
    traces = [rolled(env, [text], group="g", attempt=number) for number, text in enumerate(["a", "bb"])]
    assert [trace.reward for trace in traces] == [None, None]
    assert not any(trace.errors for trace in traces)
    asyncio.run(score_group(env, TASK, traces))
    assert [trace.reward for trace in traces] == [2.5, 0.5]


def test_a_group_reward_that_fails_is_named_on_every_trace():
    env = environment(Ranked)
    trace = rolled(env, ["a"])
    asyncio.run(score_group(env, TASK, [trace]))
    assert trace.rewards == {"shortest": (1.0, 2.0), "odd": None}
    assert names(trace) == ["EnvironmentFault"]


def test_a_group_reward_gives_one_number_for_each_trace():
    class Short(OneTask):
        @rf.group_reward
        def few(self, traces) -> list[float]:
            return [1.0]

        @rf.group_reward
        def wrong(self, traces) -> list[object]:
            return [1.0, "x"]

    env = environment(Short)
    traces = [rolled(env, ["a"]), rolled(env, ["b"])]
    asyncio.run(score_group(env, TASK, traces))
    for trace in traces:
        assert trace.rewards == {"few": None, "wrong": None}
        assert names(trace) == ["EnvironmentFault", "ValueRefused"]
        assert "1 scores for 2 traces" in trace.errors[0].message


def test_a_saved_trace_can_be_scored_again():
    class Graded(OneTask):
        @rf.reward
        def length(self, trace) -> float:
            return len(trace.last_reply)

    trace = attempt(environment(OneTask), ["four"])
    asyncio.run(score_trace(environment(Graded), RolloutContext(TASK, trace)))
    assert trace.rewards == {"length": (4.0, 1.0)}
