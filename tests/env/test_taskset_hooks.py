"""Hooks take what they name; what nobody provides is refused when the taskset is loaded."""

import asyncio
import random
import threading
from types import SimpleNamespace

import pytest

import ramify as rf
from ramify.env import Endpoint, Hook, collect_hooks
from ramify.errors import ConfigInvalid, EnvironmentFault
from tests.env.context import context, run


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


def test_hooks_are_found_by_decorator_and_by_name():
    hooks = collect_hooks(Everything())
    assert [hook.name for hook in hooks.rewards] == ["first", "second"]
    assert [hook.weight for hook in hooks.rewards] == [1.0, 0.5]
    assert [hook.name for hook in hooks.metrics] == ["length"]
    assert [hook.name for hook in hooks.stops] == ["said_enough"]
    assert [(hook.name, hook.weight) for hook in hooks.group_rewards] == [("best", 2)]
    assert hooks.setup is not None
    assert hooks.finalize is None
    assert hooks.rewards[0].injected_parameters == {"task", "trace"}


def test_hooks_receive_what_they_name():
    hooks = collect_hooks(Everything())
    rng, endpoint = random.Random(1), Endpoint("http://localhost/v1", "secret", "policy")
    here = context(rf.Task(prompt="p", answer="a"), "a", rng=rng, endpoint=endpoint, state=SimpleNamespace(enough=True))

    async def test():
        assert await hooks.rewards[0](here) == 1.0
        assert await hooks.rewards[1](here) == 1
        assert await hooks.stops[0](here) is True
        assert await hooks.group_rewards[0](here, traces=[here.trace, here.trace]) == [1.0, 1.0]
        assert hooks.setup is not None
        await hooks.setup(here)

    run(test())
    assert here.state.seen == (rng, None, endpoint)


def test_the_secret_of_an_endpoint_is_not_printed():
    assert "secret" not in repr(Endpoint("http://localhost/v1", "secret", "policy"))


def test_a_sync_hook_runs_in_a_thread_and_does_not_hold_up_the_loop():
    release = threading.Event()

    class Slow(rf.Taskset):
        @rf.reward
        def waits(self):
            assert release.wait(10)
            return 1.0

    async def test():
        waiting = asyncio.create_task(collect_hooks(Slow()).rewards[0](context()))
        await asyncio.sleep(0)
        release.set()  # only reached if the hook does not block us
        assert await waiting == 1.0

    run(test())


def test_a_parameter_that_nobody_provides_is_refused_when_loaded():
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


def test_a_parameter_with_a_default_is_the_hooks_own():
    class Fine(rf.Taskset):
        @rf.reward
        def solved(self, task, scale=3.0):
            return scale

    assert run(collect_hooks(Fine()).rewards[0](context())) == 3.0


def test_traces_belong_to_group_rewards_alone():
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


def test_gold_and_validate_run_without_a_model_so_they_may_not_ask_for_one():
    class Wrong(rf.Taskset):
        def gold(self, task, endpoint):
            return "a"

    with pytest.raises(ConfigInvalid, match=r"Wrong\.gold.*'endpoint'"):
        collect_hooks(Wrong())


def test_a_reward_that_is_overridden_without_its_decorator_stays_one():
    class Other(Everything):
        def second(self, task):
            return 7.0

    hooks = collect_hooks(Other())
    assert [(hook.name, hook.weight) for hook in hooks.rewards] == [("first", 1.0), ("second", 0.5)]
    assert run(hooks.rewards[1](context())) == 7.0


def test_a_decorated_method_can_still_be_called_as_it_is():
    assert Everything().length(context(None, "abc").trace) == 3


def test_the_tools_of_a_rollout_are_the_marked_methods_and_what_tools_returns():
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
        return [tool.name for tool in (await hooks.build_toolset(context(task))).tools]

    assert run(names(rf.Task(prompt="p"))) == ["add"]
    assert run(names(rf.Task(prompt="p", answer="a"))) == ["add", "shout"]


def test_what_user_returns_is_checked():
    class Wrong(rf.Taskset):
        def user(self, task):
            return "hello"

    with pytest.raises(EnvironmentFault, match="expected a User or None, found a str"):
        run(collect_hooks(Wrong()).build_user(context()))


def test_a_hook_keeps_the_context_variables_of_its_caller():
    from contextvars import ContextVar

    here: ContextVar[str] = ContextVar("here")

    def look():
        return here.get()

    async def test():
        here.set("caller")
        return await Hook(look, "test")(context())

    assert run(test()) == "caller"


def test_config_is_the_annotated_class_and_its_defaults_hold_without_one():
    class MyConfig(rf.TasksetConfig):
        size: int = 3

    class Mine(rf.Taskset):
        config: MyConfig

    Mine.__annotations__["config"] = MyConfig  # a local class; files of users are modules
    assert Mine().config.size == 3
    assert Mine(MyConfig(size=5)).config.size == 5
