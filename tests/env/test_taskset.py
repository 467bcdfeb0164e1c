"""Hooks receive the parameters they name; unknown parameters are refused when the taskset is loaded."""

import asyncio
import random
import threading
from types import SimpleNamespace

import pytest

import ramify as rf
from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.env import collect_hooks
from ramify.infer.gateway import Endpoint
from tests.support.rollout_context import make_context


class Everything(rf.Taskset):
    def load(self):
        yield rf.Task(prompt="p", answer="a")

    @rf.reward
    def first(self, task, trace):
        return float(trace.last_reply == task.answer)

    @rf.reward(weight=0.5)
    async def second(self, trace) -> float:
        await asyncio.sleep(0)
        return len(trace.last_reply)

    @rf.metric
    def length(self, trace):
        return len(trace.last_reply)

    @rf.stop
    def said_enough(self, trace, state):
        return state.enough

    @rf.group_reward(weight=2)
    def best(self, task, traces):
        return [float(trace.last_reply == task.answer) for trace in traces]

    def setup(self, state, rng, runtime, endpoint):
        state.seen = (rng, runtime, endpoint)

    def helper(self, nothing_we_provide):
        return nothing_we_provide


def test_hooks_are_collected_by_decorator_and_by_name():
    hooks = collect_hooks(Everything())
    assert [hook.name for hook in hooks.rewards] == ["first", "second"]
    assert [hook.weight for hook in hooks.rewards] == [1.0, 0.5]
    assert [hook.name for hook in hooks.metrics] == ["length"]
    assert [hook.name for hook in hooks.stops] == ["said_enough"]
    assert [(hook.name, hook.weight) for hook in hooks.group_rewards] == [("best", 2)]
    assert hooks.setup is not None
    assert hooks.finalize is None
    assert hooks.rewards[0].injected_parameters == {"task", "trace"}


async def test_hooks_receive_the_parameters_they_name():
    hooks = collect_hooks(Everything())
    rng, endpoint = random.Random(1), Endpoint("http://localhost/v1", "secret", "policy")
    context = make_context(
        rf.Task(prompt="p", answer="a"), "a", rng=rng, endpoint=endpoint, state=SimpleNamespace(enough=True)
    )

    assert await hooks.rewards[0](context) == 1.0
    assert await hooks.rewards[1](context) == 1
    assert await hooks.stops[0](context) is True
    assert await hooks.group_rewards[0](context, traces=[context.trace, context.trace]) == [1.0, 1.0]
    assert hooks.setup is not None
    await hooks.setup(context)
    assert context.state.seen == (rng, None, endpoint)


async def test_sync_hook_runs_in_a_thread_without_blocking_the_loop():
    release = threading.Event()

    class Slow(rf.Taskset):
        @rf.reward
        def waits(self):
            assert release.wait(10)
            return 1.0

    waiting = asyncio.create_task(collect_hooks(Slow()).rewards[0](make_context()))
    await asyncio.sleep(0)
    release.set()  # only reached if the hook does not block us
    assert await waiting == 1.0


def test_unknown_parameter_is_refused_at_load():
    class Wrong(rf.Taskset):
        @rf.reward
        def solved(self, task, trases):
            return 1.0

    with pytest.raises(ConfigInvalid) as caught:
        collect_hooks(Wrong())
    message = caught.value.message
    assert "Wrong.solved" in message
    assert "'trases'" in message
    assert "did you mean trace?" in message
    assert "task, trace, runtime, rng, state, endpoint" in message


async def test_unknown_parameter_with_a_default_keeps_it():
    class Fine(rf.Taskset):
        @rf.reward
        def solved(self, task, scale=3.0):
            return scale

    assert await collect_hooks(Fine()).rewards[0](make_context()) == 3.0


def test_only_group_rewards_take_traces():
    class Wrong(rf.Taskset):
        @rf.reward
        def solved(self, traces):
            return 1.0

    class Blind(rf.Taskset):
        @rf.group_reward
        def best(self, task):
            return [1.0]

    with pytest.raises(ConfigInvalid, match="'traces'"):
        collect_hooks(Wrong())
    with pytest.raises(ConfigInvalid, match=r"Blind\.best.*must name `traces`"):
        collect_hooks(Blind())


def test_gold_and_validate_cannot_name_the_endpoint():
    class Wrong(rf.Taskset):
        def gold(self, task, endpoint):
            return "a"

    with pytest.raises(ConfigInvalid, match=r"Wrong\.gold.*'endpoint'"):
        collect_hooks(Wrong())


async def test_override_without_a_decorator_inherits_the_mark():
    class Other(Everything):
        def second(self, task):
            return 7.0

    hooks = collect_hooks(Other())
    assert [(hook.name, hook.weight) for hook in hooks.rewards] == [("first", 1.0), ("second", 0.5)]
    assert await hooks.rewards[1](make_context()) == 7.0


async def test_toolset_contains_tool_methods_and_the_result_of_tools():
    def shout(text: str) -> str:
        return text.upper()

    class WithTools(rf.Taskset):
        @rf.tool
        def add(self, a: int, b: int) -> int:
            return a + b

        def tools(self, task):
            return [shout] if task.answer else []

    hooks = collect_hooks(WithTools())

    async def names(task):
        return [tool.name for tool in (await hooks.build_toolset(make_context(task))).tools]

    assert await names(rf.Task(prompt="p")) == ["add"]
    assert await names(rf.Task(prompt="p", answer="a")) == ["add", "shout"]


async def test_result_of_user_must_be_a_user():
    class Wrong(rf.Taskset):
        def user(self, task):
            return "hello"

    with pytest.raises(EnvironmentFault, match="expected a User or None, found a str"):
        await collect_hooks(Wrong()).build_user(make_context())


def test_config_is_an_instance_of_the_annotated_class():
    class MyConfig(rf.TasksetConfig):
        size: int = 3

    class Mine(rf.Taskset):
        config: MyConfig

    Mine.__annotations__["config"] = MyConfig  # a local class; files of users are modules
    assert Mine().config.size == 3
    assert Mine(MyConfig(size=5)).config.size == 5
