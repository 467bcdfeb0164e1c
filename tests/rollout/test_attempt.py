"""One attempt: what its trace says, whom a failure is blamed on, and what is left of it when it is over."""

import asyncio
import os

import httpx
import pytest

import ramify as rf
from ramify.errors import BudgetExceeded, ConfigInvalid, ProviderError, SandboxError, TokensRequired
from ramify.gateway import ChatPolicy, Gateway
from ramify.harness import Harness, HarnessConfig
from ramify.rollout import run_attempt
from ramify.rollout.config import SourceConfig
from ramify.runtime import LocalRuntime
from ramify.trace import decode_trace, encode_trace
from tests.rollout.stage import TASK, OneTask, attempt, attempted, call, environment, names, policy_of, said


class Scored(OneTask):
    @rf.reward(weight=0.5)
    def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @rf.metric
    def letters(self, trace) -> float:
        return len(trace.last_reply)


def test_the_header_says_what_was_run():
    env = environment(Scored, name="scored", sampling={"temperature": 0.5, "max_tokens": 32})
    trace = attempt(env, ["42"], group="g7", attempt=3)
    assert (trace.id, trace.episode, trace.group, trace.attempt, trace.env) == ("r1", "r1", "g7", 3, "scored")
    assert trace.task == TASK.to_wire()
    assert trace.harness == {"id": "chat"}
    assert trace.runtime == {"id": "local"}
    assert trace.sampler["model"] == "tiny"
    assert trace.sampler["sampling"]["temperature"] == 0.5
    assert trace.rewards == {"right": (1.0, 0.5)}
    assert trace.metrics == {"letters": 2.0}
    assert decode_trace(encode_trace(trace)).reward == 0.5


def test_phases_are_told_in_order_and_timed():
    class Slow(Scored):
        async def setup(self) -> None:
            await asyncio.sleep(0.02)

        async def finalize(self) -> None:
            await asyncio.sleep(0.01)

    told = []
    trace = attempt(
        environment(Slow), ["42"], on_progress=lambda phase, trace: told.append((phase, len(trace.sampled_nodes)))
    )
    assert told == [
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


def test_attempts_that_are_asked_for_at_once_begin_in_rounds_of_their_own():
    env, began, rounds = environment(Scored), [], 0

    async def count() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    def watch(phase, trace) -> None:
        if phase == "boot":
            began.append(rounds)

    async def crowd() -> None:
        counting = asyncio.create_task(count())
        async with asyncio.timeout(20):
            await asyncio.gather(*(attempted(env, ["42"], on_progress=watch) for _ in range(8)))
        counting.cancel()

    asyncio.run(crowd())
    assert len(began) == 8
    assert len(set(began[1:])) == 7


def test_state_rng_and_the_box_are_the_rollouts_own():
    class Stateful(OneTask):
        async def setup(self, state, runtime, rng) -> None:
            state.number = rng.random()
            await runtime.write("note", "hello")

        @rf.reward
        async def kept(self, state, runtime) -> float:
            assert (await runtime.read("note")) == b"hello"
            return state.number

    env = environment(Stateful)
    first, again = attempt(env, ["a"], seed=1), attempt(env, ["a"], seed=1)
    others = attempt(env, ["a"], seed=2), attempt(env, ["a"], seed=1, attempt=1)
    assert first.reward == again.reward
    assert first.reward not in [other.reward for other in others]


def test_a_call_is_sampled_with_the_same_seed_again_and_with_another_elsewhere():
    def seeds(**options):
        trace = attempt(environment(OneTask), ["a"], **options)
        return [trace.nodes[node].call.sampling_params["seed"] for node in trace.sampled_nodes]

    assert seeds(seed=5) == seeds(seed=5)
    assert seeds(seed=5) != seeds(seed=5, attempt=1)
    assert seeds(seed=5) != seeds(seed=6)


# -- the policy's failures are scored ---------------------------------------------------------------------------------


def test_a_budget_that_is_used_up_is_the_policys_doing():
    trace = attempt(environment(Scored, max_input_tokens=5), ["42"])
    assert names(trace) == [BudgetExceeded.name]
    assert trace.stop == "BudgetExceeded"
    assert trace.rewards == {"right": (0.0, 0.5)}


def test_an_agent_that_takes_too_long_is_scored_with_what_it_has():
    class Waiting(Scored):
        @rf.tool
        async def wait(self) -> None:
            """Wait."""
            await asyncio.sleep(60)

    trace = attempt(environment(Waiting, harness={"timeout": 0.2}), [call("wait")])
    assert names(trace) == ["RolloutDeadline"]
    assert trace.rewards == {"right": (0.0, 0.5)}
    trace = attempt(environment(Waiting), [call("wait")], rf.Task(prompt="go", timeout=0.2))
    assert names(trace) == ["RolloutDeadline"]


# -- the system's failures are not ------------------------------------------------------------------------------------


def test_a_setup_that_raises_ends_the_attempt_and_leaves_the_rewards_due():
    class Broken(Scored):
        def setup(self) -> None:
            raise KeyError("corpus")

    trace = attempt(environment(Broken), [])
    assert names(trace) == ["EnvironmentFault"]
    assert "setup" in trace.errors[0].message
    assert "corpus" in trace.errors[0].message
    assert trace.errors[0].cause is not None
    assert trace.rewards == {"right": None}
    assert trace.reward is None
    assert not trace.sampled_nodes


def test_a_setup_that_hangs_is_ended_by_its_deadline():
    class Hanging(Scored):
        async def setup(self) -> None:
            await asyncio.sleep(60)

    trace = attempt(environment(Hanging, timeouts={"setup": 0.05}), [])
    assert names(trace) == ["DeadlineExceeded"]
    assert "setup" in trace.errors[0].message


def test_rewards_that_hang_are_ended_and_stay_due():
    class Hanging(Scored):
        @rf.reward
        async def never(self) -> float:
            await asyncio.sleep(60)
            return 1.0

    trace = attempt(environment(Hanging, timeouts={"scoring": 0.05}), ["42"])
    assert names(trace) == ["DeadlineExceeded"]
    assert trace.rewards == {"right": (1.0, 0.5), "never": None}


def test_a_model_call_is_made_again_by_itself_and_fails_by_its_own_name():
    lost = ProviderError("lost")
    trace = attempt(environment(Scored, model_retries=1), [lost, "42"])
    assert trace.reward == 0.5
    assert not trace.errors
    trace = attempt(environment(Scored, model_retries=1), [lost, lost, "42"])
    assert names(trace) == ["ProviderError"]
    assert trace.reward is None


class Flaky(LocalRuntime):
    failures = 0

    async def start(self, task) -> None:
        type(self).failures -= 1
        if type(self).failures >= 0:
            raise SandboxError("no room")
        await super().start(task)


def test_a_call_to_the_runtime_is_made_again_by_itself():
    runtime = {"id": f"{__name__}:Flaky"}
    Flaky.failures = 2
    assert attempt(environment(Scored, runtime=runtime), ["42"]).reward == 0.5
    Flaky.failures = 9
    assert names(attempt(environment(Scored, runtime=runtime), ["42"])) == ["SandboxError"]


def test_a_user_that_raises_is_the_environments_fault():
    class Rude(rf.User):
        def respond(self):
            raise RuntimeError("no")

    class Talking(Scored):
        def user(self):
            return Rude()

    trace = attempt(environment(Talking), ["42"])
    assert names(trace) == ["EnvironmentFault"]
    assert trace.reward is None


# -- rewards ----------------------------------------------------------------------------------------------------------


def test_a_reward_that_raises_is_named_and_takes_no_other_with_it():
    class Raising(Scored):
        @rf.reward
        def broken(self) -> float:
            raise ZeroDivisionError("by zero")

    trace = attempt(environment(Raising), ["42"])
    assert names(trace) == ["EnvironmentFault"]
    assert "broken" in trace.errors[0].message
    assert "ZeroDivisionError" in trace.errors[0].message
    assert trace.rewards == {"right": (1.0, 0.5), "broken": None}
    assert trace.metrics == {"letters": 2.0}


def test_a_reward_that_exits_or_cancels_what_it_waits_for_is_named_too():
    class Leaving(Scored):
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

    trace = attempt(environment(Leaving), ["42"])
    assert names(trace) == ["EnvironmentFault"] * 3
    assert trace.rewards == {"right": (1.0, 0.5), "exits": None, "leaves": None, "cancels": None}


def test_a_phase_that_cancels_what_it_waits_for_is_the_environments_fault():
    class Cancelling(Scored):
        async def setup(self) -> None:
            lookup = asyncio.ensure_future(asyncio.sleep(60))
            lookup.cancel()
            await lookup

    trace = attempt(environment(Cancelling), [])
    assert names(trace) == ["EnvironmentFault"] and "setup: CancelledError" in trace.errors[0].message


@pytest.mark.parametrize("value", ["good", float("nan"), None, [1.0]])
def test_a_reward_that_is_no_number_is_a_named_error(value):
    class Odd(OneTask):
        @rf.reward
        def odd(self):
            return value

    trace = attempt(environment(Odd), ["42"])
    assert names(trace) == ["ValueRefused"]
    assert "rewards.odd" in trace.errors[0].message
    assert trace.reward is None


def test_what_cannot_travel_in_info_is_named_with_key_and_type():
    class Storing(Scored):
        def finalize(self, trace) -> None:
            trace.info["where"] = object()

    trace = attempt(environment(Storing), ["42"])
    assert names(trace) == ["ValueRefused"]
    assert "info.where" in trace.errors[0].message
    assert "object" in trace.errors[0].message


def test_what_was_slipped_into_a_list_of_info_is_named_too_and_the_trace_can_travel():
    class Storing(Scored):
        def finalize(self, trace) -> None:
            trace.info["seen"] = []
            trace.info["seen"].append({1, 2})
            trace.info["kept"] = "yes"

    trace = attempt(environment(Storing), ["42"])
    assert names(trace) == ["ValueRefused"]
    assert "info.seen[0]" in trace.errors[0].message
    assert "set" in trace.errors[0].message
    assert decode_trace(encode_trace(trace)).info == {"kept": "yes"}


# -- the way out ------------------------------------------------------------------------------------------------------


class Sleeping(OneTask):
    @rf.tool
    async def sleep(self, runtime, state) -> str:
        """Sleep in the box."""
        box.append((await runtime.spawn(["sleep", "60"])).pid)
        box.append(str(runtime.workdir))
        asleep.set()
        await asyncio.sleep(60)
        return ""


box: list = []
asleep = asyncio.Event()


def test_a_cancelled_attempt_leaves_nothing_behind():
    async def check() -> None:
        asleep.clear()
        box.clear()
        async with Gateway() as gateway:
            running = asyncio.create_task(attempted(environment(Sleeping), [call("sleep")], gateway=gateway))
            async with asyncio.timeout(10):
                await asleep.wait()
            assert gateway._sessions
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert not gateway._sessions
        pid, workdir = box
        assert not os.path.exists(workdir)  # noqa: PTH110
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(asyncio.wait_for(check(), 20))


def test_an_attempt_that_is_cancelled_again_and_again_still_stops_its_box(monkeypatch):
    stopped = []

    async def main() -> None:
        closing, go_on = asyncio.Event(), asyncio.Event()

        async def stop(self) -> None:
            closing.set()
            await go_on.wait()
            stopped.append(self)

        monkeypatch.setattr(LocalRuntime, "stop", stop)
        running = asyncio.create_task(attempted(environment(Scored), ["42"]))
        await closing.wait()
        for _ in range(3):
            running.cancel()
            await asyncio.wait([running], timeout=0.01)
            assert not running.done()
        go_on.set()
        await asyncio.wait([running])
        assert running.cancelled() and len(stopped) == 1

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_result_stands_whatever_goes_wrong_with_the_box(monkeypatch):
    async def stop(self) -> None:
        raise ValueError("no way out")

    monkeypatch.setattr(LocalRuntime, "stop", stop)
    trace = attempt(environment(Scored), ["42"])
    assert trace.reward == 0.5 and trace.info["cleanup"] == "ValueError: no way out"


def test_a_box_is_kept_when_asked_for(tmp_path):
    kept = []

    class Looking(OneTask):
        def finalize(self, runtime) -> None:
            kept.append(runtime.workdir)

    env = environment(Looking, runtime={"keep": True, "root": str(tmp_path)})
    attempt(env, ["a"])
    assert kept[0].is_dir()


# -- the endpoint -----------------------------------------------------------------------------------------------------


class Calling(OneTask):
    @rf.tool
    async def ask(self, question: str, endpoint) -> str:
        """Ask the model itself."""
        body = {"model": "gpt-x", "messages": [{"role": "user", "content": question}]}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.api_key}"}, trust_env=False) as http:
            answer = await http.post(f"{endpoint.base_url}/chat/completions", json=body, timeout=10)
        return answer.json()["choices"][0]["message"]["content"]


def test_a_tool_may_ask_the_policy_through_the_endpoint():
    async def check() -> None:
        async with Gateway() as gateway:
            script = [call("ask", question="why"), "because", "so it is"]
            trace = await attempted(environment(Calling), script, gateway=gateway)
        assert ("tool", "because") in said(trace)
        assert len(trace.branches) == 2
        assert len(trace.sampled_nodes) == 3

    asyncio.run(asyncio.wait_for(check(), 20))


def test_an_endpoint_without_a_gateway_is_refused_before_anything_starts():
    with pytest.raises(ConfigInvalid, match="endpoint"):
        attempt(environment(Calling), [])
    assert not environment(Scored).requires_endpoint


# -- what cannot work -------------------------------------------------------------------------------------------------


class Picky(Harness):
    def check_compatibility(self, hooks, runtime) -> None:
        if not len(hooks.static_tools):
            raise ConfigInvalid("the picky harness works with tools alone, and this taskset has none")

    async def run(self, context, session, tools, user, stops) -> str:
        return "done"


def test_a_pairing_that_cannot_work_is_refused_with_the_reason():
    harness = {"id": f"{__name__}:Picky"}
    with pytest.raises(ConfigInvalid, match="tools alone"):
        environment(Scored, harness=harness)
    assert attempt(environment(Sleeping, harness=harness), []).stop == "done"


def test_a_task_that_the_runtime_cannot_take_is_refused_with_the_reason():
    with pytest.raises(ConfigInvalid, match="image"):
        attempt(environment(Scored), [], rf.Task(prompt="go", image="python:3.12"))


def test_training_needs_tokens_and_plain_sampling():
    async def chat() -> None:
        await run_attempt(environment(Scored), TASK, policy=ChatPolicy("http://nowhere/v1", "m"), id="r", train=True)

    with pytest.raises(TokensRequired):
        asyncio.run(chat())
    with pytest.raises(ConfigInvalid, match="top_p"):
        attempt(environment(Scored, sampling={"top_p": 0.9}), [], train=True)
    assert policy_of([]).trainable


def test_the_limit_of_a_task_replaces_that_of_the_harness_in_the_longest_attempt():
    source = SourceConfig(taskset={"id": "reverse-text"})
    phases = source.max_attempt_seconds() - HarnessConfig().timeout
    assert source.max_attempt_seconds(5000.0) == phases + 5000.0
    assert source.model_copy(update={"harness": {"timeout": 30}}).max_attempt_seconds() == phases + 30.0
