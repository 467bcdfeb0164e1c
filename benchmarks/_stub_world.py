"""The processes around an orchestrator, as stubs in one process: env servers, an engine and a trainer.

    python benchmarks/_stub_world.py '{"orchestrator": "tcp://...", "num_env_servers": 4, ...}'

The env servers speak the real wire protocol and answer each rollout with an episode of about 2 kB, whose rewards differ
within a group. The engine accepts every version. The trainer registers, takes batch after batch without computing
anything, publishes and commits. Each line of output is JSON: first the addresses, then one line per trained step.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from _instant_engine import InstantEngine, response

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
from ramify.trace import Episode, Message, ModelCall, Trace, VersionSpan, encode_episode
from ramify.train.batch import PackSpec
from ramify.train.protocol import (
    BatchRequest,
    CheckpointRequest,
    PublishedRequest,
    RegisterReply,
    RegisterRequest,
    TrainedRequest,
)

NUM_TASKS = 1000
MODEL = "tiny"
PROMPT_TOKENS, REPLY_TOKENS = 90, 64
CALL_TIMEOUT = 300.0  # seconds


class StubSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the world consists of."""

    orchestrator: str
    """Address that the trainer connects to."""
    num_env_servers: int = 1
    rollout_seconds: float = 0.0
    """How long each rollout takes."""
    commit_interval: int = 20
    """Steps between two commits."""


class StubEngine(InstantEngine):
    """An engine that serves whatever version it is told to."""

    version = {"policy": MODEL, "incarnation": 0, "step": 0}

    def _answer(self, path: bytes, body: bytes) -> bytes:
        if path == b"/update_weights":
            incarnation, step = Path(json.loads(body)["path"]).name.split("-")
            StubEngine.version = {"policy": MODEL, "incarnation": int(incarnation), "step": int(step)}
            return response({"version": self.version, "seconds": 0.0})
        if path.endswith(b"/models"):
            card = {"id": MODEL, "owned_by": "ramify", "max_model_len": 4096, "version": self.version}
            return response({"object": "list", "data": [card]})
        return super()._answer(path, body)


def make_episode(id: str, group: str, attempt: int) -> bytes:
    """Return an encoded episode of about 2 kB."""
    trace = Trace(id=id, group=group, attempt=attempt, task={"prompt": "p" * 100})
    system = trace.graph.add_node(-1, Message("system", "s" * 100), range(PROMPT_TOKENS - 30))
    user = trace.graph.add_node(system, Message("user", "p" * 100), range(30))
    trace.graph.add_node(
        user,
        Message("assistant", "r" * 200),
        [100 + attempt, *range(REPLY_TOKENS - 1)],
        sampled_span=(0, REPLY_TOKENS),
        logprobs=[-0.125] * REPLY_TOKENS,
        call=ModelCall(f"call-{id}"),
        versions=[VersionSpan(MODEL, 0, StubEngine.version["step"], REPLY_TOKENS)],
    )
    trace.rewards["match"] = (float(attempt % 2), 1.0)
    return encode_episode(Episode((trace,)))


class StubEnvServer:
    """An env server that replays: the episode of each member of a group is made once and sent for every group."""

    def __init__(self, rollout_seconds: float) -> None:
        self._rollout_seconds = rollout_seconds
        self._episodes: dict[int, bytes] = {}
        self._reply = msgspec.msgpack.encode(RolloutResponse(worker="stub"))
        handlers = {"info": self.info, "health": self.health, "tasks": self.tasks, "run": self.run}
        self.server = WireServer(handlers, "tcp://127.0.0.1:0", name="env-server")

    async def info(self, _: IncomingRequest) -> WireMessage:
        return WireMessage.encode(
            EnvServerInfo(
                name="stub",
                version="1",
                taskset={"id": "stub"},
                harness={"id": "chat"},
                runtime={"id": "local"},
                model=MODEL,
                trainable=True,
                rewards={"match": 1.0},
                group_rewards={},
                metrics=[],
                sampling={},
                limits={},
                environment={},
            )
        )

    async def health(self, _: IncomingRequest) -> WireMessage:
        health = EnvServerHealth(state="ok", reason="", running=0, waiting=0, workers=[], deaths=[])
        return WireMessage.encode(health)

    async def tasks(self, request: IncomingRequest) -> WireMessage:
        page = request.decode(TasksRequest)
        numbers = range(page.start, min(page.start + page.count, NUM_TASKS))
        tasks = [TaskItem(f"task-{number}", {"prompt": f"{number}"}) for number in numbers]
        return WireMessage.encode(TaskPage(tasks, page.start + page.count >= NUM_TASKS))

    async def run(self, request: IncomingRequest) -> WireMessage:
        rollout = request.decode(RolloutRequest)
        if self._rollout_seconds:
            await asyncio.sleep(self._rollout_seconds)
        if rollout.attempt not in self._episodes:
            self._episodes[rollout.attempt] = make_episode(f"replayed.{rollout.attempt}", "replayed", rollout.attempt)
        return WireMessage((self._reply, self._episodes[rollout.attempt]))


async def train(settings: StubSettings, weights: Path) -> None:
    """Take every batch as soon as it is there, and report it as trained, published and committed."""
    client = await WireClient(settings.orchestrator).start(CALL_TIMEOUT)  # the orchestrator is started later

    async def call(method: str, request: msgspec.Struct) -> WireMessage:
        return await client.call(method, WireMessage.encode(request), timeout=CALL_TIMEOUT)

    try:
        hello = RegisterRequest(rank=0, world_size=1, pack_spec=PackSpec(pack_tokens=8192))
        registration = (await call("hello", hello)).decode(RegisterReply)
        sender: dict[str, Any] = {"rank": 0, "incarnation": registration.incarnation}
        step = registration.committed

        async def publish() -> None:
            version = (MODEL, registration.incarnation, step)
            path = str(weights / f"{registration.incarnation}-{step:06}")
            await call("published", PublishedRequest(**sender, version=version, path=path))

        await publish()
        while (await call("batch", BatchRequest(**sender, step=step))).blobs:
            await call("trained", TrainedRequest(**sender, step=step, metrics={"train/loss": 0.0}))
            step += 1
            await publish()
            if step % settings.commit_interval == 0:
                commit = CheckpointRequest(**sender, step=step, directory=f"step_{step:06}-0", digest=f"{step}")
                await call("checkpoint", commit)
            print(json.dumps({"step": step, "time": time.time()}), flush=True)
    finally:
        await client.close()


async def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=StubSettings)
    servers = [StubEnvServer(settings.rollout_seconds).server for _ in range(settings.num_env_servers)]
    for server in servers:
        await server.start()
    loop = asyncio.get_running_loop()
    engine = await loop.create_server(lambda: StubEngine(b"", None, 0, 0, 0.0, {}), "127.0.0.1", 0, backlog=1024)
    url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    print(json.dumps({"env_servers": [server.address for server in servers], "engine": url}), flush=True)
    await train(settings, Path("weights"))


if __name__ == "__main__":
    asyncio.run(main())
