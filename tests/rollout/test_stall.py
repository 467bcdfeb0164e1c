"""An engine that stands still takes no time from a rollout, and is never blamed on the policy."""

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
from tests.client.fake import Exchange, Fake, hang
from tests.gateway.engine import TINY, Engine
from tests.rollout.stage import TASK, OneTask, environment, names

QUICK = ClientConfig(health_interval=0.1, health_timeout=0.5, stall_after=0.4, connect_timeout=1.0)
LIMIT = 1.5  # seconds of harness.timeout
STOPPED = 2.5  # seconds for which an engine stands still


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
    assert child.pid is not None
    os.kill(child.pid, signal.SIGCONT)
    runner.run(child.stop())


@asynccontextmanager
async def policy_at(url: str) -> AsyncIterator[TokenPolicy]:
    async with InferenceClient(url, QUICK) as client:
        yield TokenPolicy(client, TINY, "tiny")


async def rollout(policy: TokenPolicy, taskset: type[rf.Taskset] = Answered, **source: Any) -> Trace:
    env = environment(taskset, **{"harness": {"timeout": LIMIT}, "sampling": {"max_tokens": 4}, **source})
    episode = await run_attempt(env, TASK, policy=policy, id="r1", seed=7, train=True)
    return episode.traces[0]


async def interrupted(
    rolling: Awaitable[Trace], halt: Callable[[], Awaitable[None]], resume: Callable[[], Awaitable[None]]
) -> Trace:
    """The trace of a rollout whose engine stands still for a while from the beginning on."""
    await halt()
    task = asyncio.ensure_future(rolling)
    try:
        await asyncio.wait([task], timeout=STOPPED)
    finally:
        await resume()
    return await asyncio.wait_for(task, 30)


async def send(pid: int, sign: signal.Signals) -> None:
    os.kill(pid, sign)


def test_a_stopped_engine_takes_no_time_from_the_rollout(runner: asyncio.Runner, server: EngineProcess):
    async def main() -> tuple[Trace, Trace]:
        pid = server.pid
        assert pid is not None
        async with policy_at(server.url) as policy:
            plain = await rollout(policy, harness={"timeout": 60})
            stopped = await interrupted(
                rollout(policy, TwoTurns), lambda: send(pid, signal.SIGSTOP), lambda: send(pid, signal.SIGCONT)
            )
        return plain, stopped

    plain, stopped = runner.run(main())
    assert names(stopped) == []
    assert len(stopped.sampled_nodes) == 2
    assert (
        stopped.nodes[stopped.sampled_nodes[0]].token_ids.tolist()
        == plain.nodes[plain.sampled_nodes[0]].token_ids.tolist()
    )
    assert stopped.timing.stalled >= STOPPED - LIMIT


def test_a_paused_engine_takes_no_time_from_the_rollout(runner: asyncio.Runner, server: EngineProcess):
    async def main() -> Trace:
        async with policy_at(server.url) as policy, InferenceClient(server.url) as control:
            return await interrupted(rollout(policy), control.pause, control.resume)

    trace = runner.run(main())
    assert names(trace) == []
    assert trace.timing.stalled >= STOPPED - LIMIT


def test_an_engine_that_never_moves_again_is_a_system_failure(runner: asyncio.Runner, server: EngineProcess):
    async def main() -> Trace:
        pid = server.pid
        assert pid is not None
        async with policy_at(server.url) as policy:
            rolling = rollout(policy, harness={"timeout": 0.2}, timeouts={"engine_stall": 1.0})
            return await interrupted(rolling, lambda: send(pid, signal.SIGSTOP), lambda: send(pid, signal.SIGCONT))

    trace = runner.run(main())
    (failure,) = trace.errors
    assert (failure.name, failure.blame, failure.retryable) == ("EngineStalled", "system", True)
    assert "timeouts.engine_stall" in failure.message
    assert trace.rewards == {"letters": None}


class Counting(Fake):
    """Never answers a generation; its counter of steps moves while `works` says so."""

    def __init__(self, *, works: bool) -> None:
        super().__init__()
        self.works, self.steps = works, 0
        self.behaviour = hang

    async def control(self, path: str, exchange: Exchange) -> None:
        assert path == "/metrics"
        self.steps += self.works
        text = f"ramify_steps_total {self.steps}\n".encode()
        exchange.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        await exchange.writer.drain()


@pytest.mark.parametrize(
    ("works", "stall_limit", "failure"), [(True, 25.0, "RolloutDeadline"), (False, 1.2, "EngineStalled")]
)
def test_work_for_others_is_progress_and_answering_alone_is_not(works: bool, stall_limit: float, failure: str):
    async def main() -> Trace:
        async with Counting(works=works) as engine, policy_at(engine.url) as policy:
            return await rollout(policy, harness={"timeout": 0.6}, timeouts={"engine_stall": stall_limit})

    assert names(asyncio.run(asyncio.wait_for(main(), 30))) == [failure]


def test_only_the_request_that_was_lost_is_sent_again():
    """The engine goes away under the second call, for longer than the agent's time; the rollout is not run again."""
    phases: list[str] = []

    async def main() -> tuple[Trace, Engine]:
        engine = Engine(["one", "two"])

        def watch(phase: str, _: Trace) -> None:
            phases.append(phase)
            if phase == "turn":
                engine.gate.clear()  # the next request gets no answer

        async with engine, policy_at(engine.url) as policy:
            env = environment(TwoTurns, harness={"timeout": LIMIT}, sampling={"max_tokens": 64})
            rolling = asyncio.create_task(
                run_rollout(env, TASK, policy=policy, id="r1", seed=7, train=True, on_progress=watch)
            )
            while len(engine.asked) < 2:
                await asyncio.sleep(0.005)
            await engine.__aexit__()
            await asyncio.wait([rolling], timeout=STOPPED)
            await engine.__aenter__()
            engine.gate.set()
            episode = await asyncio.wait_for(rolling, 30)
        return episode.traces[0], engine

    trace, engine = asyncio.run(main())
    assert names(trace) == []
    assert phases.count("boot") == 1
    assert len(trace.sampled_nodes) == 2
    first, lost, again = engine.asked
    assert lost == again != first


def test_a_slow_tool_is_on_the_clock():
    class Slow(Answered):
        @rf.stop
        async def late(self) -> bool:
            await asyncio.sleep(30)
            return True

    async def main() -> Trace:
        async with Engine(["one"]) as engine, policy_at(engine.url) as policy:
            return await rollout(policy, Slow, harness={"timeout": 0.5})

    assert names(asyncio.run(asyncio.wait_for(main(), 20))) == ["RolloutDeadline"]


def test_a_stall_before_the_agent_begins_is_not_counted(runner: asyncio.Runner):
    async def main() -> None:
        clock = StallClock()
        with clock.track_request(tolerance=0.05):  # a request of `setup`
            await asyncio.sleep(0.3)
        async with HarnessTimeout(0.1, clock, stall_timeout=0.2):
            await asyncio.sleep(5)

    with pytest.raises(RolloutDeadline, match=r"longer than 0.1 s$"):
        runner.run(main())
