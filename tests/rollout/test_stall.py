"""The time of a stalled engine does not count towards the harness timeout and is never blamed on the policy."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import ramify as rf
from ramify.core.errors import BudgetExceeded
from ramify.infer.client import ClientConfig, InferenceClient
from ramify.infer.client.stall_clock import StallClock
from ramify.infer.gateway import TokenPolicy
from ramify.rollout import run_attempt
from ramify.rollout.harness_timeout import HarnessTimeout
from ramify.trace import Trace
from tests.support.attempts import TASK, OneTask, error_names, load_env
from tests.support.engine import TINY, Exchange, ScriptedEngine, hang, respond, run_engine

QUICK_CLIENT = ClientConfig(health_interval=0.1, health_timeout=0.5, stall_after=0.4, connect_timeout=1.0)
HARNESS_TIMEOUT = 1.5  # seconds of harness.timeout
STALL_SECONDS = 2.0  # seconds for which an engine is stalled


class Answered(OneTask):
    @rf.reward
    def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class AsksTwice(rf.User):
    def respond(self, turn: int) -> str | None:
        return "and again" if turn == 1 else None


class TwoTurns(Answered):
    def user(self) -> rf.User:
        return AsksTwice()


@asynccontextmanager
async def policy_at(url: str) -> AsyncIterator[TokenPolicy]:
    async with InferenceClient(url, QUICK_CLIENT) as client:
        yield TokenPolicy(client, TINY, "tiny")


async def rollout(policy: TokenPolicy, taskset: type[rf.Taskset] = Answered, **source: Any) -> Trace:
    env = load_env(taskset, **{"harness": {"timeout": HARNESS_TIMEOUT}, "sampling": {"max_tokens": 4}, **source})
    episode = await run_attempt(env, TASK, policy=policy, id="r1", seed=7, train=True)
    return episode.traces[0]


class StoppableEngine(ScriptedEngine):
    """An engine in a thread of its own that can be stopped like a process: the kernel still accepts connections."""

    async def __aenter__(self) -> "ScriptedEngine":
        self._loop, self._continued = asyncio.get_running_loop(), threading.Event()
        return await super().__aenter__()

    def stop(self) -> None:
        self._continued.clear()
        self._loop.call_soon_threadsafe(self._continued.wait, 60)

    def resume(self) -> None:
        self._continued.set()


async def run_interrupted(
    rollout_task: Awaitable[Trace], stop: Callable[[], None], resume: Callable[[], None]
) -> Trace:
    """Return the trace of a rollout whose engine is stalled for a while from the start."""
    stop()
    task = asyncio.ensure_future(rollout_task)
    try:
        await asyncio.wait([task], timeout=STALL_SECONDS)
    finally:
        resume()
    return await asyncio.wait_for(task, 60)


async def test_stopped_engine_does_not_use_up_the_harness_timeout():
    with run_engine(StoppableEngine(["one", "two"])) as engine:
        async with policy_at(engine.url) as policy:
            trace = await run_interrupted(rollout(policy, TwoTurns), engine.stop, engine.resume)
    assert error_names(trace) == []
    assert len(trace.sampled_nodes) == 2
    assert trace.timing.stalled >= STALL_SECONDS - HARNESS_TIMEOUT


async def test_paused_engine_does_not_use_up_the_harness_timeout():
    """It answers health checks, but its counter of steps does not move."""
    async with CountingEngine(works=False) as engine, policy_at(engine.url) as policy:
        engine.behaviour = respond
        trace = await run_interrupted(rollout(policy), engine.gate.clear, engine.gate.set)
    assert error_names(trace) == []
    assert trace.timing.stalled >= STALL_SECONDS - HARNESS_TIMEOUT


async def test_engine_that_never_continues_is_a_system_failure():
    with run_engine(StoppableEngine(["one"])) as engine:
        async with policy_at(engine.url) as policy:
            rollout_task = rollout(policy, harness={"timeout": 1.0}, timeouts={"engine_stall": 1.5})
            trace = await run_interrupted(rollout_task, engine.stop, engine.resume)
    (failure,) = trace.errors
    assert (failure.name, failure.blame, failure.retryable) == ("ProviderError", "system", True)
    assert "timeouts.engine_stall" in failure.message
    assert trace.rewards == {"letters": None}


class CountingEngine(ScriptedEngine):
    """Never answers a generation; its step counter increases if `works`."""

    def __init__(self, *, works: bool) -> None:
        super().__init__()
        self.works, self.steps = works, 0
        self.behaviour = hang

    async def control(self, path: str, exchange: Exchange) -> None:
        assert path == "/metrics"
        self.steps += self.works
        await exchange.reply(f"ramify_steps_total {self.steps}\n")


@pytest.mark.parametrize(
    ("works", "stall_timeout", "failure"), [(True, 50.0, "BudgetExceeded"), (False, 1.5, "ProviderError")]
)
async def test_engine_steps_count_as_progress_and_http_responses_do_not(
    works: bool, stall_timeout: float, failure: str
):
    async with asyncio.timeout(60), CountingEngine(works=works) as engine, policy_at(engine.url) as policy:
        trace = await rollout(policy, harness={"timeout": 1.0}, timeouts={"engine_stall": stall_timeout})
    assert error_names(trace) == [failure]


async def test_only_the_lost_request_is_sent_again():
    """The engine stops during the second call, longer than the harness timeout; the rollout is not started again."""
    phases: list[str] = []

    engine = ScriptedEngine(["one", "two"])

    def on_progress(phase: str, _: int) -> None:
        phases.append(phase)
        if phase == "turn":
            engine.gate.clear()  # the next request gets no answer

    async with engine, policy_at(engine.url) as policy:
        env = load_env(TwoTurns, harness={"timeout": HARNESS_TIMEOUT}, sampling={"max_tokens": 64})
        rollout_task = asyncio.create_task(
            run_attempt(env, TASK, policy=policy, id="r1", seed=7, train=True, on_progress=on_progress)
        )
        while len(engine.requests) < 2:
            await asyncio.sleep(0.005)
        await engine.__aexit__()
        await asyncio.wait([rollout_task], timeout=STALL_SECONDS)
        await engine.__aenter__()
        engine.gate.set()
        episode = await asyncio.wait_for(rollout_task, 60)
    trace, engine = episode.traces[0], engine
    assert error_names(trace) == []
    assert phases.count("boot") == 1
    assert len(trace.sampled_nodes) == 2
    first, lost, again = engine.requests
    assert lost == again != first


async def test_slow_stop_hook_counts_towards_the_harness_timeout():
    class Slow(Answered):
        @rf.stop
        async def late(self) -> bool:
            await asyncio.sleep(30)
            return True

    async with asyncio.timeout(60), ScriptedEngine(["one"]) as engine, policy_at(engine.url) as policy:
        trace = await rollout(policy, Slow, harness={"timeout": 0.5})
    assert error_names(trace) == ["BudgetExceeded"]


async def test_stall_before_the_harness_phase_is_not_counted():
    clock = StallClock()
    clock.start_request(tolerance=0.05)  # a request of `setup`
    await asyncio.sleep(0.3)
    clock.end_request()
    with pytest.raises(BudgetExceeded, match=r"longer than 0.1 s$"):
        async with HarnessTimeout(0.1, clock, stall_timeout=0.2):
            await asyncio.sleep(5)
