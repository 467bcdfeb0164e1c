"""Which failures are retried, how often, and when group rewards are computed."""

import ramify as rf
from ramify.core.errors import ProviderError
from ramify.env import RolloutContext
from ramify.rollout import repeat_attempt, run_attempt, score_group, score_trace
from ramify.trace import Trace
from tests.support.attempts import TASK, OneTask, error_names, load_env, run_one, scripted_policy


async def run_with_retries(env, script, **options) -> Trace:
    policy = scripted_policy(script)

    async def run():
        return (await run_attempt(env, TASK, policy=policy, id="r1", **options)).traces

    return (await repeat_attempt(run, env))[0]


class Failing(OneTask):
    """A taskset whose reward raises `failures` times."""

    def __init__(self, config=None) -> None:
        super().__init__(config)
        self.failures = 0
        self.num_calls = 0

    @rf.reward
    def fickle(self) -> float:
        self.num_calls += 1
        if self.num_calls <= self.failures:
            raise OSError("not yet")
        return 1.0


async def test_missing_reward_is_retried():
    env = load_env(Failing)
    env.taskset.failures = 1
    trace = await run_with_retries(env, ["a", "b"])
    assert trace.reward == 1.0
    assert not trace.errors
    assert len(trace.sampled_nodes) == 1  # the trace of the second run, alone
    assert trace.last_reply == "b"
    assert len(trace.info["tries"]) == 1
    assert "not yet" in trace.info["tries"][0]


async def test_last_try_is_the_result():
    env = load_env(Failing, max_tries=2)
    env.taskset.failures = 9
    trace = await run_with_retries(env, ["a", "b", "c"])
    assert error_names(trace) == ["EnvironmentFault"]
    assert env.taskset.num_calls == 2


async def test_system_failure_is_retried():
    error = ProviderError("lost")
    assert (await run_with_retries(load_env(Failing), [error, error, "a"])).reward == 1.0


async def test_policy_failure_is_not_retried():
    env = load_env(Failing, max_input_tokens=2)
    trace = await run_with_retries(env, ["a", "b"])
    assert error_names(trace) == ["BudgetExceeded"]
    assert trace.reward == 1.0
    assert env.taskset.num_calls == 1


async def test_failure_that_is_not_retryable_is_not_retried():
    class Wordy(OneTask):
        runs = 0

        @rf.reward
        def wordy(self):
            type(self).runs += 1
            return "very good"

    trace = await run_with_retries(load_env(Wordy), ["a"] * 3)
    assert error_names(trace) == ["OperationInvalid"]
    assert Wordy.runs == 1


class GroupScored(OneTask):
    @rf.group_reward(weight=2.0)
    def shortest(self, traces) -> list[float]:
        shortest_length = min(len(trace.last_reply) for trace in traces)
        return [float(len(trace.last_reply) == shortest_length) for trace in traces]

    @rf.group_reward
    def odd(self, task, traces, rng) -> list[float]:
        if task.answer == "42" and len(traces) == 1:
            raise ValueError("one trace is not a group")
        return [0.5 for _ in traces]


async def test_group_rewards_are_none_until_the_group_is_scored():
    env = load_env(GroupScored)
    traces = [await run_with_retries(env, [text], group="g", attempt=number) for number, text in enumerate(["a", "bb"])]
    assert [trace.reward for trace in traces] == [None, None]
    assert not any(trace.errors for trace in traces)
    await score_group(env, TASK, traces)
    assert [trace.reward for trace in traces] == [2.5, 0.5]


async def test_failed_group_reward_is_recorded_in_every_trace():
    env = load_env(GroupScored)
    trace = await run_with_retries(env, ["a"])
    await score_group(env, TASK, [trace])
    assert trace.rewards == {"shortest": (1.0, 2.0), "odd": None}
    assert error_names(trace) == ["EnvironmentFault"]


async def test_group_reward_must_return_one_number_per_trace():
    class Short(OneTask):
        @rf.group_reward
        def few(self, traces) -> list[float]:
            return [1.0]

        @rf.group_reward
        def wrong(self, traces) -> list[object]:
            return [1.0, "x"]

    env = load_env(Short)
    traces = [await run_with_retries(env, ["a"]), await run_with_retries(env, ["b"])]
    await score_group(env, TASK, traces)
    for trace in traces:
        assert trace.rewards == {"few": None, "wrong": None}
        assert error_names(trace) == ["EnvironmentFault", "OperationInvalid"]
        assert "1 scores for 2 traces" in trace.errors[0].message


async def test_trace_can_be_scored_again():
    class Graded(OneTask):
        @rf.reward
        def length(self, trace) -> float:
            return len(trace.last_reply)

    trace = await run_one(load_env(OneTask), ["four"])
    await score_trace(load_env(Graded), RolloutContext(TASK, trace))
    assert trace.rewards == {"length": (4.0, 1.0)}
