"""One attempt: its trace, the blame of failures, and the cleanup."""

import asyncio
import os

import httpx
import pytest

import ramify as rf
from ramify.core.errors import BudgetExceeded, ConfigInvalid, EngineIncompatible, ProviderError, SandboxError
from ramify.infer.gateway import ChatPolicy, Gateway
from ramify.rollout import run_attempt
from ramify.rollout.config import SourceConfig
from ramify.rollout.harness import Harness, HarnessConfig
from ramify.rollout.runtime import LocalRuntime
from ramify.trace import decode_trace, encode_trace
from tests.support.attempts import (
    TASK,
    OneTask,
    error_names,
    load_env,
    run_one,
    run_one_async,
    scripted_policy,
    tool_call,
)


class Scored(OneTask):
    @rf.reward(weight=0.5)
    def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @rf.metric
    def letters(self, trace) -> float:
        return len(trace.last_reply)


async def test_trace_header_describes_the_attempt():
    env = load_env(Scored, name="scored", sampling={"temperature": 0.5, "max_tokens": 32})
    trace = await run_one(env, ["42"], group="g7", attempt=3)
    assert (trace.id, trace.episode, trace.group, trace.attempt, trace.env) == ("r1", "r1", "g7", 3, "scored")
    assert trace.task == TASK.to_wire()
    assert trace.harness == {"id": "chat"}
    assert trace.runtime == {"id": "local"}
    assert trace.sampler["model"] == "tiny"
    assert trace.sampler["sampling"]["temperature"] == 0.5
    assert trace.rewards == {"right": (1.0, 0.5)}
    assert trace.metrics == {"letters": 2.0}
    assert decode_trace(encode_trace(trace)).reward == 0.5


async def test_phases_are_reported_in_order_and_timed():
    class Slow(Scored):
        async def setup(self) -> None:
            await asyncio.sleep(0.02)

        async def finalize(self) -> None:
            await asyncio.sleep(0.01)

    phases = []
    trace = await run_one(
        load_env(Slow),
        ["42"],
        on_progress=lambda phase, calls: phases.append((phase, calls)),
    )
    assert phases == [
        ("boot", 0),
        ("setup", 0),
        ("harness", 0),
        ("turn", 1),
        ("finalize", 1),
        ("scoring", 1),
        ("done", 1),
    ]
    assert trace.timing.setup >= 0.02
    assert trace.timing.finalize >= 0.01
    assert 0 < trace.timing.model <= trace.timing.harness
    assert trace.timing.scoring > 0


async def test_concurrent_attempts_start_in_separate_loop_iterations():
    env, start_iterations, iterations = load_env(Scored), [], 0

    async def count_iterations() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    def on_progress(phase, calls) -> None:
        if phase == "boot":
            start_iterations.append(iterations)

    counter_task = asyncio.create_task(count_iterations())
    async with asyncio.timeout(60):
        await asyncio.gather(*(run_one_async(env, ["42"], on_progress=on_progress) for _ in range(8)))
    counter_task.cancel()
    assert len(start_iterations) == 8
    assert len(set(start_iterations[1:])) == 7


async def test_state_rng_and_runtime_belong_to_the_attempt():
    class Stateful(OneTask):
        async def setup(self, state, runtime, rng) -> None:
            state.number = rng.random()
            await runtime.write("note", "hello")

        @rf.reward
        async def kept(self, state, runtime) -> float:
            assert (await runtime.read("note")) == b"hello"
            return state.number

    env = load_env(Stateful)
    first, again = await run_one(env, ["a"], seed=1), await run_one(env, ["a"], seed=1)
    others = await run_one(env, ["a"], seed=2), await run_one(env, ["a"], seed=1, attempt=1)
    assert first.reward == again.reward
    assert first.reward not in [other.reward for other in others]


async def test_sampling_seed_depends_on_seed_and_attempt_only():
    async def seeds(**options):
        trace = await run_one(load_env(OneTask), ["a"], **options)
        return [trace.nodes[node].call.sampling_params["seed"] for node in trace.sampled_nodes]

    assert await seeds(seed=5) == await seeds(seed=5)
    assert await seeds(seed=5) != await seeds(seed=5, attempt=1)
    assert await seeds(seed=5) != await seeds(seed=6)


# -- failures of the policy are scored --------------------------------------------------------------------------------


async def test_exhausted_budget_is_blamed_on_the_policy_and_scored():
    trace = await run_one(load_env(Scored, max_input_tokens=5), ["42"])
    assert error_names(trace) == [BudgetExceeded.name]
    assert trace.stop == "BudgetExceeded"
    assert trace.rewards == {"right": (0.0, 0.5)}


async def test_agent_that_times_out_is_scored():
    class Waiting(Scored):
        @rf.tool
        async def wait(self) -> None:
            """Wait."""
            await asyncio.sleep(60)

    trace = await run_one(load_env(Waiting, harness={"timeout": 0.2}), [tool_call("wait")])
    assert error_names(trace) == ["BudgetExceeded"]
    assert trace.rewards == {"right": (0.0, 0.5)}
    trace = await run_one(load_env(Waiting), [tool_call("wait")], rf.Task(prompt="go", timeout=0.2))
    assert error_names(trace) == ["BudgetExceeded"]


# -- system failures are not scored -----------------------------------------------------------------------------------


async def test_setup_that_raises_ends_the_attempt_without_rewards():
    class Broken(Scored):
        def setup(self) -> None:
            raise KeyError("corpus")

    trace = await run_one(load_env(Broken), [])
    assert error_names(trace) == ["EnvironmentFault"]
    assert "setup" in trace.errors[0].message
    assert "corpus" in trace.errors[0].message
    assert trace.errors[0].cause is not None
    assert trace.rewards == {"right": None}
    assert trace.reward is None
    assert not trace.sampled_nodes


async def test_setup_that_hangs_times_out():
    class Hanging(Scored):
        async def setup(self) -> None:
            await asyncio.sleep(60)

    trace = await run_one(load_env(Hanging, timeouts={"setup": 0.05}), [])
    assert error_names(trace) == ["DeadlineExceeded"]
    assert "setup" in trace.errors[0].message


async def test_reward_that_hangs_times_out_and_stays_none():
    class Hanging(Scored):
        @rf.reward
        async def never(self) -> float:
            await asyncio.sleep(60)
            return 1.0

    trace = await run_one(load_env(Hanging, timeouts={"scoring": 2.0}), ["42"])
    assert error_names(trace) == ["DeadlineExceeded"]
    assert trace.rewards == {"right": (1.0, 0.5), "never": None}


async def test_a_task_may_allow_more_time_for_its_rewards():
    class Slow(Scored):
        @rf.reward
        async def slow(self) -> float:
            await asyncio.sleep(0.1)
            return 1.0

    task = rf.Task(prompt="?", answer="42", scoring_timeout=20)
    trace = await run_one(load_env(Slow, timeouts={"scoring": 0.01}), ["42"], task=task)
    assert (error_names(trace), trace.rewards["slow"]) == ([], (1.0, 1.0))


async def test_a_failed_model_call_ends_the_attempt_with_its_error():
    trace = await run_one(load_env(Scored), [ProviderError("lost"), "42"])
    assert error_names(trace) == ["ProviderError"]
    assert trace.reward is None


class FlakyRuntime(LocalRuntime):
    failures = 0

    async def start(self, task) -> None:
        type(self).failures -= 1
        if type(self).failures >= 0:
            raise SandboxError("no room")
        await super().start(task)


async def test_runtime_call_is_retried():
    runtime = {"id": f"{__name__}:FlakyRuntime"}
    FlakyRuntime.failures = 2
    assert (await run_one(load_env(Scored, runtime=runtime), ["42"])).reward == 0.5
    FlakyRuntime.failures = 9
    assert error_names(await run_one(load_env(Scored, runtime=runtime), ["42"])) == ["SandboxError"]


async def test_user_that_raises_is_an_environment_fault():
    class Rude(rf.User):
        def respond(self):
            raise RuntimeError("no")

    class Talking(Scored):
        def user(self):
            return Rude()

    trace = await run_one(load_env(Talking), ["42"])
    assert error_names(trace) == ["EnvironmentFault"]
    assert trace.reward is None


# -- rewards ----------------------------------------------------------------------------------------------------------


async def test_reward_that_raises_does_not_affect_others():
    class Raising(Scored):
        @rf.reward
        def broken(self) -> float:
            raise ZeroDivisionError("by zero")

    trace = await run_one(load_env(Raising), ["42"])
    assert error_names(trace) == ["EnvironmentFault"]
    assert "broken" in trace.errors[0].message
    assert "ZeroDivisionError" in trace.errors[0].message
    assert trace.rewards == {"right": (1.0, 0.5), "broken": None}
    assert trace.metrics == {"letters": 2.0}


async def test_reward_that_exits_or_is_cancelled_inside_is_an_environment_fault():
    class ExitingRewards(Scored):
        @rf.reward
        def exits(self) -> float:
            raise SystemExit(0)

        @rf.reward
        async def leaves(self) -> float:
            raise SystemExit(0)

        @rf.reward
        async def cancels(self) -> float:
            lookup = asyncio.ensure_future(asyncio.sleep(60))
            lookup.cancel()
            await lookup
            return 1.0

    trace = await run_one(load_env(ExitingRewards), ["42"])
    assert error_names(trace) == ["EnvironmentFault"] * 3
    assert trace.rewards == {"right": (1.0, 0.5), "exits": None, "leaves": None, "cancels": None}


async def test_cancellation_inside_a_phase_is_an_environment_fault():
    class Cancelling(Scored):
        async def setup(self) -> None:
            lookup = asyncio.ensure_future(asyncio.sleep(60))
            lookup.cancel()
            await lookup

    trace = await run_one(load_env(Cancelling), [])
    assert error_names(trace) == ["EnvironmentFault"] and "setup: CancelledError" in trace.errors[0].message


@pytest.mark.parametrize("value", ["good", float("nan"), None, [1.0]])
async def test_reward_that_is_not_a_number_is_refused(value):
    class InvalidReward(OneTask):
        @rf.reward
        def odd(self):
            return value

    trace = await run_one(load_env(InvalidReward), ["42"])
    assert error_names(trace) == ["OperationInvalid"]
    assert "rewards.odd" in trace.errors[0].message
    assert trace.reward is None


async def test_unserializable_info_is_refused_with_key_and_type():
    class Storing(Scored):
        def finalize(self, trace) -> None:
            trace.info["where"] = object()

    trace = await run_one(load_env(Storing), ["42"])
    assert error_names(trace) == ["OperationInvalid"]
    assert "info.where" in trace.errors[0].message
    assert "object" in trace.errors[0].message


async def test_unserializable_item_added_to_a_list_in_info_is_dropped():
    class Storing(Scored):
        def finalize(self, trace) -> None:
            trace.info["seen"] = []
            trace.info["seen"].append({1, 2})
            trace.info["kept"] = "yes"

    trace = await run_one(load_env(Storing), ["42"])
    assert error_names(trace) == ["OperationInvalid"]
    assert "info.seen[0]" in trace.errors[0].message
    assert "set" in trace.errors[0].message
    assert decode_trace(encode_trace(trace)).info == {"kept": "yes"}


# -- cleanup ----------------------------------------------------------------------------------------------------------


class Sleeping(OneTask):
    @rf.tool
    async def sleep(self, runtime, state) -> str:
        """Sleep."""
        spawned.append((await runtime.spawn(["sleep", "60"])).pid)
        spawned.append(str(runtime.workdir))
        tool_called.set()
        await asyncio.sleep(60)
        return ""


spawned: list = []
tool_called = asyncio.Event()


@pytest.mark.process
async def test_cancelled_attempt_cleans_up():
    tool_called.clear()
    spawned.clear()
    async with asyncio.timeout(60), Gateway() as gateway:
        attempt_task = asyncio.create_task(run_one_async(load_env(Sleeping), [tool_call("sleep")], gateway=gateway))
        await tool_called.wait()
        assert gateway._sessions
        attempt_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt_task
        assert not gateway._sessions
    pid, workdir = spawned
    assert not os.path.exists(workdir)  # noqa: PTH110
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_repeatedly_cancelled_attempt_still_stops_its_runtime(monkeypatch):
    stopped, closing, may_stop = [], asyncio.Event(), asyncio.Event()

    async def stop(self) -> None:
        closing.set()
        await may_stop.wait()
        stopped.append(self)

    monkeypatch.setattr(LocalRuntime, "stop", stop)
    async with asyncio.timeout(20):
        attempt_task = asyncio.create_task(run_one_async(load_env(Scored), ["42"]))
        await closing.wait()
        for _ in range(3):
            attempt_task.cancel()
            await asyncio.wait([attempt_task], timeout=0.01)
            assert not attempt_task.done()
        may_stop.set()
        await asyncio.wait([attempt_task])
    assert attempt_task.cancelled() and len(stopped) == 1


async def test_failure_to_stop_the_runtime_does_not_change_the_result(monkeypatch):
    async def stop(self) -> None:
        raise ValueError("no way out")

    monkeypatch.setattr(LocalRuntime, "stop", stop)
    trace = await run_one(load_env(Scored), ["42"])
    assert trace.reward == 0.5 and trace.info["cleanup"] == "ValueError: no way out"


async def test_keep_preserves_the_work_directory(tmp_path):
    kept = []

    class KeepsWorkdir(OneTask):
        def finalize(self, runtime) -> None:
            kept.append(runtime.workdir)

    env = load_env(KeepsWorkdir, runtime={"keep_workdir": True, "workdir_root": str(tmp_path)})
    trace = await run_one(env, ["a"])
    assert kept[0].is_dir()
    assert trace.info["kept_workdirs"] == [str(kept[0])]


# -- the endpoint -----------------------------------------------------------------------------------------------------


class Calling(OneTask):
    @rf.tool
    async def ask(self, question: str, endpoint) -> str:
        """Ask the model itself."""
        body = {"model": "gpt-x", "messages": [{"role": "user", "content": question}]}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.api_key}"}, trust_env=False) as http:
            answer = await http.post(f"{endpoint.base_url}/chat/completions", json=body, timeout=10)
        return answer.json()["choices"][0]["message"]["content"]


async def test_endpoint_without_a_gateway_is_refused():
    with pytest.raises(ConfigInvalid, match="endpoint"):
        await run_one(load_env(Calling), [])
    assert not load_env(Scored).requires_endpoint


# -- refused before the start -----------------------------------------------------------------------------------------


class ToolsOnlyHarness(Harness):
    def check_compatibility(self, hooks, runtime) -> None:
        if not len(hooks.static_tools):
            raise ConfigInvalid("this harness needs tools, and the taskset has none")

    async def run(self, context, session, tools, user, stops) -> str:
        return "done"


async def test_incompatible_harness_is_refused_with_the_reason():
    harness = {"id": f"{__name__}:ToolsOnlyHarness"}
    with pytest.raises(ConfigInvalid, match="needs tools"):
        load_env(Scored, harness=harness)
    assert (await run_one(load_env(Sleeping, harness=harness), [])).stop == "done"


async def test_task_that_the_runtime_does_not_support_is_refused():
    with pytest.raises(ConfigInvalid, match="image"):
        await run_one(load_env(Scored), [], rf.Task(prompt="go", image="python:3.12"))


async def test_training_requires_tokens_and_default_sampling():
    with pytest.raises(EngineIncompatible):
        await run_attempt(
            load_env(Scored), TASK, policy=ChatPolicy("http://nowhere/v1", "m", retries=0), id="r", train=True
        )
    with pytest.raises(ConfigInvalid, match="top_p"):
        await run_one(load_env(Scored, sampling={"top_p": 0.9}), [], train=True)
    assert scripted_policy([]).trainable


def test_task_timeout_replaces_the_harness_timeout_in_max_attempt_seconds():
    source = SourceConfig(taskset={"id": "reverse-text"})
    phases = source.max_attempt_seconds() - HarnessConfig().timeout
    assert source.max_attempt_seconds(5000.0) == phases + 5000.0
    assert source.model_copy(update={"harness": {"timeout": 30}}).max_attempt_seconds() == phases + 30.0
