"""Slow rollouts: are they trained on as often as they are begun, and what does waiting for them cost?

A real orchestrator; an environment that sleeps, an engine that takes every version, and a trainer that only says that
it has trained. One task in ten sleeps 20 times the median, and the median is a quarter of a step. The reference is the
same run with no bound on staleness, where a batch is whatever came back first. Shares are those of the groups that were
issued before the last `max_off_policy` steps: of the others, some could not have been trained yet.
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

from ramify.envserver.messages import (
    EnvServerHealth,
    EnvServerInfo,
    RolloutRequest,
    RolloutResponse,
    TaskItem,
    TaskPage,
    TasksRequest,
)
from ramify.orchestrate.config import RunConfig
from ramify.orchestrate.orchestrator import Orchestrator
from ramify.store import RunStore
from ramify.store.group_state import GroupState
from ramify.store.ledger import GroupRecord, Ledger
from ramify.trace import Episode, Message, ModelCall, Trace, VersionRun, encode_episode
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
from ramify.wire import IncomingRequest, WireClient, WireServer
from ramify.wire import WireMessage as Wired

STEP, MEDIAN, SLOW = 0.8, 0.2, 20  # seconds of a step and of most tasks; how much longer the others take
GROUPS, ATTEMPTS, TASKS, EVERY = 8, 2, 50, 10  # groups of a batch; one task in EVERY is slow
OFF_POLICY, UNBOUND = 8, 1000
STEPS = 60
POINTS, THROUGHPUT = 0.02, 0.85
DEADLINE = 60.0


def is_slow(task: int) -> bool:
    return task % EVERY == 0


def rollout(ask: RolloutRequest) -> bytes:
    """An episode of two tokens; whether it is a good one differs from attempt to attempt."""
    trace = Trace(id=ask.id, attempt=ask.attempt, task=ask.task, rewards={"luck": (float(ask.attempt % 2), 1.0)})
    node = trace.add_node(-1, Message("user", "?"), [1, 2, 3])
    reply, runs = Message("assistant", "!"), [VersionRun("tiny", 0, 0, 2)]
    call = ModelCall(ask.id, finish_reason="stop")
    trace.add_node(
        node, reply, [5, 10, 11], sampled_span=(1, 3), logprobs=[-0.5, -0.5], versions=runs, call=call, trainable=True
    )
    return encode_episode(Episode((trace,)))


class Sleeping:
    """An env server whose rollouts only take their time."""

    async def info(self, _: IncomingRequest) -> Wired:
        return Wired.encode(
            EnvServerInfo(
                name="naps",
                version="",
                model="tiny",
                trainable=True,
                taskset={},
                harness={},
                runtime={},
                rewards={},
                group_rewards={},
                metrics=[],
                sampling={},
                limits={},
                environment={},
            )
        )

    async def health(self, _: IncomingRequest) -> Wired:
        return Wired.encode(EnvServerHealth(state="ok", reason="", running=0, waiting=0, workers=[], deaths=[]))

    async def tasks(self, request: IncomingRequest) -> Wired:
        asked = request.decode(TasksRequest)
        numbers = range(asked.start, min(TASKS, asked.start + asked.count))
        page = [TaskItem(str(number), {"prompt": "?", "number": number}) for number in numbers]
        return Wired.encode(TaskPage(page, asked.start + asked.count >= TASKS))

    async def run(self, request: IncomingRequest) -> Wired:
        ask = request.decode(RolloutRequest)
        around = random.Random(ask.id).uniform(0.8, 1.2)
        await asyncio.sleep(around * MEDIAN * (SLOW if is_slow(ask.task["number"]) else 1))
        return Wired.encode(RolloutResponse("w0", 1), rollout(ask))


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[str]:
    """Takes every version at once; nobody samples from it."""
    version = PolicyVersion("tiny", 0, 0)

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def train(address: str) -> tuple[float, float]:
    """A trainer that takes `STEP` seconds for every step; when it was given its first batch, and done with its last."""
    orchestrator = await WireClient(address).start(DEADLINE)

    async def say(method: str, said: object) -> Wired:
        return await orchestrator.call(method, Wired.encode(said), timeout=DEADLINE)

    welcome = (await say("hello", RegisterRequest(rank=0, world_size=1, pack_spec=PackSpec()))).decode(RegisterReply)
    who = {"rank": 0, "incarnation": welcome.incarnation}
    began, step = 0.0, 0
    while (await say("batch", BatchRequest(**who, step=step))).blobs:
        began = began or time.monotonic()
        await asyncio.sleep(STEP)
        await say("trained", TrainedRequest(**who, step=step, metrics={}))
        step += 1
        await say("published", PublishedRequest(**who, version=("tiny", 0, step), path=f"/versions/{step}"))
    ended = time.monotonic()
    await say("checkpoint", CheckpointRequest(**who, step=step))
    await orchestrator.close()
    return began, ended


@dataclass(frozen=True, slots=True)
class Measured:
    """A run that is over."""

    rate: float  # steps a second
    staleness: int  # the oldest group that was trained
    issued: float  # share of slow tasks
    trained: float

    @classmethod
    def of(cls, groups: list[GroupRecord], seconds: float) -> "Measured":
        early = [group for group in groups if group.version < STEPS - OFF_POLICY]
        trained = [group for group in groups if group.state is GroupState.TRAINED]
        oldest = max(group.step - group.version for group in trained if group.step is not None)
        done = [group for group in early if group.state is GroupState.TRAINED]
        return cls(STEPS / seconds, oldest, _slow(early), _slow(done))


def _slow(groups: list[GroupRecord]) -> float:
    return sum(is_slow(group.task_number) for group in groups) / len(groups)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


async def measure(folder: Path, off_policy: int) -> Measured:
    naps = Sleeping()
    handlers = {"info": naps.info, "health": naps.health, "tasks": naps.tasks, "run": naps.run}
    async with engine() as url, WireServer(handlers, "tcp://127.0.0.1:0", name="naps") as server:
        config = RunConfig.model_validate(
            {
                "name": f"bound-{off_policy}",
                "output": folder,
                "max_steps": STEPS,
                "inference": {"engine": "external", "base_url": [url]},
                "train": [{"name": "naps", "taskset": {"id": "naps"}, "address": server.address}],
                "orchestrator": {
                    "batch_size": GROUPS * ATTEMPTS,
                    "group_size": ATTEMPTS,
                    "max_off_policy": off_policy,
                    "max_concurrency": (OFF_POLICY - 1) * GROUPS * ATTEMPTS,
                    "stall_timeout": DEADLINE,
                    "address": f"tcp://127.0.0.1:{free_port()}",
                },
            }
        )
        async with asyncio.TaskGroup() as together:
            together.create_task(Orchestrator(config).run())
            training = together.create_task(train(config.orchestrator.address))
        began, ended = training.result()
    with RunStore.open(config.path, write=False) as store:
        return Measured.of(Ledger.open_readonly(store).groups(), ended - began)


def main() -> int:
    args = parser("Slow rollouts: trained on as often as begun, and what that costs").parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        ours = asyncio.run(measure(Path(folder), OFF_POLICY))
        free = asyncio.run(measure(Path(folder), UNBOUND))
    rows = [
        Row("issued share of slow tasks", ours.issued, free.issued, ""),
        Row("trained share of slow tasks", ours.trained, free.trained, ""),
        Row("difference of the shares", abs(ours.trained - ours.issued), abs(free.trained - free.issued), "", POINTS),
        Row("steps a second", ours.rate, free.rate, "1/s", THROUGHPUT * free.rate, at_least=True),
        Row("throughput ratio", ours.rate / free.rate, 1.0, "", THROUGHPUT, at_least=True),
        Row("staleness, at most", ours.staleness, free.staleness, "steps", OFF_POLICY),
    ]
    return finish("Slow tasks, windowed and in arrival order", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
