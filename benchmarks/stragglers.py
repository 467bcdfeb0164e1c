"""Slow rollouts: whether they are trained on as often as they are issued, and what waiting for them costs.

The benchmark runs a real orchestrator with an environment that sleeps, an engine that accepts every version, and a
trainer that only acknowledges its steps. One task in ten sleeps 20 times the median, and the median is a quarter of a
step. The reference is the same run without a bound on staleness, in which a batch has the groups that finish first.
Fractions count the groups that were issued before the last `max_staleness` steps: some of the others cannot
have been trained yet.
"""

import asyncio
import contextlib
import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from _check import Row, finish, parser

from ramify.orchestrate.orchestrator import Orchestrator
from ramify.orchestrate.run_config import RunConfig
from ramify.processes.wire import IncomingRequest, WireClient, WireMessage, WireServer
from ramify.rollout.envserver.messages import (
    EnvServerHealth,
    EnvServerInfo,
    RolloutRequest,
    RolloutResponse,
    TaskItem,
    TaskPage,
    TasksRequest,
)
from ramify.run.store import RunStore
from ramify.run.store.group_state import GroupState
from ramify.run.store.ledger import GroupRecord, Ledger
from ramify.trace import Episode, Message, ModelCall, Trace, VersionSpan, encode_episode
from ramify.trace.version import PolicyVersion
from ramify.train.batch import PackSpec
from ramify.train.protocol import (
    BatchRequest,
    CheckpointRequest,
    PublishedRequest,
    RegisterReply,
    RegisterRequest,
    TrainedRequest,
)

STEP_SECONDS, MEDIAN_SECONDS, SLOW_FACTOR = 0.8, 0.2, 20  # of a step, of most tasks, of slow tasks
GROUPS_PER_BATCH, GROUP_SIZE, NUM_TASKS, SLOW_EVERY = 8, 2, 50, 10  # one task in SLOW_EVERY is slow
MAX_STALENESS, UNBOUNDED = 8, 1000
STEPS = 60
MAX_DIFFERENCE, MIN_THROUGHPUT = 0.02, 0.85
TIMEOUT = 60.0  # seconds


def is_slow(task: int) -> bool:
    return task % SLOW_EVERY == 0


def build_episode(request: RolloutRequest) -> bytes:
    """Return an episode of two tokens; its reward alternates between attempts."""
    trace = Trace(
        id=request.id,
        attempt=request.attempt,
        task=request.task,
        rewards={"luck": (float(request.attempt % 2), 1.0)},
    )
    node = trace.graph.add_node(-1, Message("user", "?"), [1, 2, 3])
    reply, runs = Message("assistant", "!"), [VersionSpan("tiny", 0, 0, 2)]
    call = ModelCall(request.id, finish_reason="stop")
    trace.graph.add_node(
        node, reply, [5, 10, 11], sampled_span=(1, 3), logprobs=[-0.5, -0.5], versions=runs, call=call, trainable=True
    )
    return encode_episode(Episode((trace,)))


class SleepingEnvServer:
    """An env server whose rollouts only sleep."""

    async def info(self, _: IncomingRequest) -> WireMessage:
        return WireMessage.encode(
            EnvServerInfo(
                name="sleep",
                version="",
                model="tiny",
                trainable=True,
                taskset={},
                harness={},
                runtime={},
                rewards={"luck": 1.0},
                group_rewards={},
                metrics=[],
                sampling={},
                limits={},
                environment={},
            )
        )

    async def health(self, _: IncomingRequest) -> WireMessage:
        return WireMessage.encode(EnvServerHealth(state="ok", reason="", running=0, waiting=0, workers=[], deaths=[]))

    async def tasks(self, request: IncomingRequest) -> WireMessage:
        tasks = request.decode(TasksRequest)
        numbers = range(tasks.start, min(NUM_TASKS, tasks.start + tasks.count))
        page = [TaskItem(str(number), {"prompt": "?", "number": number}) for number in numbers]
        return WireMessage.encode(TaskPage(page, tasks.start + tasks.count >= NUM_TASKS))

    async def run(self, request: IncomingRequest) -> WireMessage:
        rollout = request.decode(RolloutRequest)
        jitter = random.Random(rollout.id).uniform(0.8, 1.2)
        await asyncio.sleep(jitter * MEDIAN_SECONDS * (SLOW_FACTOR if is_slow(rollout.task["number"]) else 1))
        return WireMessage.encode(RolloutResponse("w0"), build_episode(rollout))


@contextlib.asynccontextmanager
async def serve_engine() -> AsyncIterator[str]:
    """Serve an engine that accepts every version at once and is never sampled from; yield its URL."""
    version = PolicyVersion("tiny", 0, 0)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal version
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
                length = next((int(line[15:]) for line in head.splitlines() if "content-length:" in line), 0)
                body = json.loads(await reader.readexactly(length) or b"{}")
                if "path" in body:
                    version = PolicyVersion("tiny", 0, int(Path(body["path"]).name))
                card = {"id": "tiny", "owned_by": "ramify", "max_model_len": 512, "version": version._asdict()}
                data = json.dumps({"data": [card], "version": version._asdict(), "seconds": 0.0}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def train(address: str) -> tuple[float, float]:
    """Train in steps of STEP_SECONDS; return the monotonic times of the first batch and of the end."""
    orchestrator = await WireClient(address).start(TIMEOUT)

    async def call(method: str, request: object) -> WireMessage:
        return await orchestrator.call(method, WireMessage.encode(request), timeout=TIMEOUT)

    reply = (await call("hello", RegisterRequest(rank=0, world_size=1, pack_spec=PackSpec()))).decode(RegisterReply)
    identity = {"rank": 0, "incarnation": reply.incarnation}
    started_at, step = 0.0, 0
    while (await call("batch", BatchRequest(**identity, step=step))).blobs:
        started_at = started_at or time.monotonic()
        await asyncio.sleep(STEP_SECONDS)
        await call("trained", TrainedRequest(**identity, step=step, metrics={}))
        step += 1
        await call("published", PublishedRequest(**identity, version=("tiny", 0, step), path=f"/versions/{step}"))
    ended_at = time.monotonic()
    await call("checkpoint", CheckpointRequest(**identity, step=step, directory=f"step_{step:06}-0", digest=f"{step}"))
    await orchestrator.close()
    return started_at, ended_at


@dataclass(frozen=True, slots=True)
class Measurement:
    """Results of one run; fractions are of slow tasks."""

    steps_per_second: float
    max_staleness: int
    issued_fraction: float
    trained_fraction: float

    @classmethod
    def from_groups(cls, groups: list[GroupRecord], seconds: float) -> "Measurement":
        early = [group for group in groups if group.version < STEPS - MAX_STALENESS]
        trained = [group for group in groups if group.state is GroupState.TRAINED]
        max_staleness = max(group.step - group.version for group in trained if group.step is not None)
        early_trained = [group for group in early if group.state is GroupState.TRAINED]
        return cls(STEPS / seconds, max_staleness, _slow_fraction(early), _slow_fraction(early_trained))


def _slow_fraction(groups: list[GroupRecord]) -> float:
    return sum(is_slow(group.task_number) for group in groups) / len(groups)


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


async def measure(directory: Path, max_staleness: int) -> Measurement:
    """Run the orchestrator with this bound on staleness."""
    env = SleepingEnvServer()
    handlers = {"info": env.info, "health": env.health, "tasks": env.tasks, "run": env.run}
    async with serve_engine() as url, WireServer(handlers, "tcp://127.0.0.1:0", name="sleep") as server:
        config = RunConfig.model_validate(
            {
                "name": f"bound-{max_staleness}",
                "output": directory,
                "max_steps": STEPS,
                "inference": {"engine": "external", "base_url": [url]},
                "train": [{"name": "sleep", "taskset": {"id": "sleep"}, "address": server.address}],
                "orchestrator": {
                    "batch_size": GROUPS_PER_BATCH * GROUP_SIZE,
                    "group_size": GROUP_SIZE,
                    "max_staleness": max_staleness,
                    "max_concurrency": (MAX_STALENESS - 1) * GROUPS_PER_BATCH * GROUP_SIZE,
                    "stall_timeout": TIMEOUT,
                    "address": f"tcp://127.0.0.1:{find_free_port()}",
                },
            }
        )
        async with asyncio.TaskGroup() as task_group:
            task_group.create_task(Orchestrator(config).run())
            training = task_group.create_task(train(config.orchestrator.address))
        started_at, ended_at = training.result()
    with RunStore.open(config.path, write=False) as store:
        return Measurement.from_groups(Ledger.open_readonly(store).groups(), ended_at - started_at)


def main() -> int:
    args = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        bounded = asyncio.run(measure(Path(directory), MAX_STALENESS))
        unbounded = asyncio.run(measure(Path(directory), UNBOUNDED))
    issued, trained = bounded.issued_fraction, bounded.trained_fraction
    reference = abs(unbounded.trained_fraction - unbounded.issued_fraction)
    rate, reference_rate = bounded.steps_per_second, unbounded.steps_per_second
    rows = [
        Row("issued share of slow tasks", issued, unbounded.issued_fraction, ""),
        Row("trained share of slow tasks", trained, unbounded.trained_fraction, ""),
        Row("difference of the shares", abs(trained - issued), reference, "", MAX_DIFFERENCE),
        Row("steps a second", rate, reference_rate, "1/s", MIN_THROUGHPUT * reference_rate, at_least=True),
        Row("throughput ratio", rate / reference_rate, 1.0, "", MIN_THROUGHPUT, at_least=True),
        Row("staleness, at most", bounded.max_staleness, unbounded.max_staleness, "steps", MAX_STALENESS),
    ]
    return finish("Slow tasks, windowed and in arrival order", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
