"""The time of a stalled engine does not count towards the harness timeout and is never blamed on the policy."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import ramify as rf
from ramify.client import ClientConfig, InferenceClient
from ramify.client.stall_clock import StallClock
from ramify.errors import RolloutDeadline
from ramify.evals.engine_process import EngineProcess
from ramify.gateway import TokenPolicy
from ramify.infer.config import EngineConfig, ModelConfig, ServeConfig, ServerConfig
from ramify.rollout import run_attempt, run_rollout
from ramify.rollout.harness_timeout import HarnessTimeout
from ramify.trace import Trace
from tests.rollout.helpers import TASK, OneTask, error_names, load_env
from tests.support.engine import TINY, Exchange, ScriptedEngine, hang

pytestmark = pytest.mark.process

QUICK_CLIENT = ClientConfig(health_interval=0.1, health_timeout=0.5, stall_after=0.4, connect_timeout=1.0)
HARNESS_TIMEOUT = 4.0  # seconds of harness.timeout
STALL_SECONDS = 5.0  # seconds for which an engine is stalled


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


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def server(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A real `ramify serve` of the tiny model."""
    config = ServeConfig(model=ModelConfig(name="tiny"), inference=EngineConfig(threads=1), server=ServerConfig(port=0))
    child = EngineProcess(config, tmp_path_factory.mktemp("serve"), start_timeout=120.0)
    runner.run(child.start())
    yield child
    os.kill(child.pid, signal.SIGCONT)
    runner.run(child.stop())


@asynccontextmanager
async def policy_at(url: str) -> AsyncIterator[TokenPolicy]:
    async with InferenceClient(url, QUICK_CLIENT) as client:
        yield TokenPolicy(client, TINY, "tiny")


async def rollout(policy: TokenPolicy, taskset: type[rf.Taskset] = Answered, **source: Any) -> Trace:
    env = load_env(taskset, **{"harness": {"timeout": HARNESS_TIMEOUT}, "sampling": {"max_tokens": 4}, **source})
    episode = await run_attempt(env, TASK, policy=policy, id="r1", seed=7, train=True)
    return episode.traces[0]


async def run_interrupted(
    rollout_task: Awaitable[Trace], pause: Callable[[], Awaitable[None]], resume: Callable[[], Awaitable[None]]
) -> Trace:
    """Return the trace of a rollout whose engine is stalled for a while from the start."""
    await pause()
    task = asyncio.ensure_future(rollout_task)
    try:
        await asyncio.wait([task], timeout=STALL_SECONDS)
    finally:
        await resume()
    return await asyncio.wait_for(task, 60)


async def send_signal(pid: int, signum: signal.Signals) -> None:
    os.kill(pid, signum)


def test_stopped_engine_does_not_use_up_the_harness_timeout(runner: asyncio.Runner, server: EngineProcess):
    async def main() -> tuple[Trace, Trace]:
        pid = server.pid
        async with policy_at(server.address) as policy:
            plain = await rollout(policy, harness={"timeout": 60})
            stopped = await run_interrupted(
                rollout(policy, TwoTurns),
                lambda: send_signal(pid, signal.SIGSTOP),
                lambda: send_signal(pid, signal.SIGCONT),
            )
        return plain, stopped

    plain, stopped = runner.run(main())
    assert error_names(stopped) == []
    assert len(stopped.sampled_nodes) == 2
    assert (
        stopped.nodes[stopped.sampled_nodes[0]].token_ids.tolist()
        == plain.nodes[plain.sampled_nodes[0]].token_ids.tolist()
    )
    assert stopped.timing.stalled >= STALL_SECONDS - HARNESS_TIMEOUT


def test_paused_engine_does_not_use_up_the_harness_timeout(runner: asyncio.Runner, server: EngineProcess):
    async def main() -> Trace:
        async with policy_at(server.address) as policy, InferenceClient(server.address) as control:
            return await run_interrupted(rollout(policy), control.pause, control.resume)

    trace = runner.run(main())
    assert error_names(trace) == []
    assert trace.timing.stalled >= STALL_SECONDS - HARNESS_TIMEOUT


def test_engine_that_never_continues_is_a_system_failure(runner: asyncio.Runner, server: EngineProcess):
    async def main() -> Trace:
        pid = server.pid
        async with policy_at(server.address) as policy:
            rollout_task = rollout(policy, harness={"timeout": 2.0}, timeouts={"engine_stall": 3.0})
            return await run_interrupted(
                rollout_task, lambda: send_signal(pid, signal.SIGSTOP), lambda: send_signal(pid, signal.SIGCONT)
            )

    trace = runner.run(main())
    (failure,) = trace.errors
    assert (failure.name, failure.blame, failure.retryable) == ("EngineStalled", "system", True)
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
    ("works", "stall_timeout", "failure"), [(True, 50.0, "RolloutDeadline"), (False, 3.0, "EngineStalled")]
)
async def test_engine_steps_count_as_progress_and_http_responses_do_not(
    works: bool, stall_timeout: float, failure: str
):
    async with asyncio.timeout(60), CountingEngine(works=works) as engine, policy_at(engine.url) as policy:
        trace = await rollout(policy, harness={"timeout": 2.0}, timeouts={"engine_stall": stall_timeout})
    assert error_names(trace) == [failure]


async def test_only_the_lost_request_is_sent_again():
    """The engine stops during the second call, longer than the harness timeout; the rollout is not started again."""
    phases: list[str] = []

    engine = ScriptedEngine(["one", "two"])

    def on_progress(phase: str, _: Trace) -> None:
        phases.append(phase)
        if phase == "turn":
            engine.gate.clear()  # the next request gets no answer

    async with engine, policy_at(engine.url) as policy:
        env = load_env(TwoTurns, harness={"timeout": HARNESS_TIMEOUT}, sampling={"max_tokens": 64})
        rollout_task = asyncio.create_task(
            run_rollout(env, TASK, policy=policy, id="r1", seed=7, train=True, on_progress=on_progress)
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
    assert error_names(trace) == ["RolloutDeadline"]


def test_stall_before_the_harness_phase_is_not_counted(runner: asyncio.Runner):
    async def main() -> None:
        clock = StallClock()
        with clock.track_request(tolerance=0.05):  # a request of `setup`
            await asyncio.sleep(0.3)
        async with HarnessTimeout(0.1, clock, stall_timeout=0.2):
            await asyncio.sleep(5)

    with pytest.raises(RolloutDeadline, match=r"longer than 0.1 s$"):
        runner.run(main())
