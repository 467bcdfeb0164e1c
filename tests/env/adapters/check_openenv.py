"""OpenEnv: servers made with its package run as processes, also with fewer sessions than rollouts, and are killed."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ramify.env.adapters.openenv import OpenEnv
from ramify.infer.gateway import Gateway
from ramify.rollout import Environment, SourceConfig, repeat_attempt, run_attempt
from ramify.rollout.validation import ScriptedPolicy
from ramify.run.store import RunStore
from ramify.trace import Trace
from tests.env.adapters.training import run_ramify, train, write_eval

SERVERS = Path(__file__).with_name("openenv_servers.py")
NUM_STEPS = 3
MAX_SESSIONS = 8
NUM_ROLLOUTS = 32


def check(python: Path, output: Path) -> None:
    for name in ("echo", "counter"):
        source = {"taskset": make_table(python, name), "pool": {"type": "static", "workers": 1}}
        traces = train(output, name, source, steps=NUM_STEPS)
        print(f"   {name}: {NUM_STEPS} steps, {len(traces)} rollouts", flush=True)
    wait_for_sessions(python, output)
    asyncio.run(kill_server(python))


def make_table(python: Path, name: str) -> dict[str, Any]:
    command = [str(python), str(SERVERS), name, "{port}", str(MAX_SESSIONS)]
    return {"id": "openenv", "command": command, "action_field": "message", "observation_field": "text"}


def wait_for_sessions(python: Path, output: Path) -> None:
    """Evaluate with more concurrent rollouts than the server has sessions: they wait, and none fails."""
    source = {"taskset": make_table(python, "counter"), "concurrency": NUM_ROLLOUTS, "num_tasks": NUM_ROLLOUTS}
    run_ramify("eval", "@", str(write_eval(output, "sessions", {**source, "repetitions": 1})), "-m", "tiny")
    with RunStore.open(output / "sessions", write=False) as store:
        rows = list(store.rollouts())
        waits = [trace.info["session_waits"] for row in rows for trace in store.read_traces(row.id)]
    assert [row.failure for row in rows] == [None] * NUM_ROLLOUTS and any(waits), waits
    print(f"   {NUM_ROLLOUTS} rollouts on {MAX_SESSIONS} sessions: {sum(map(bool, waits))} waited", flush=True)


async def kill_server(python: Path) -> None:
    """Kill the server in the middle of an episode: the attempt is run again, on a new server."""
    env = Environment.load(SourceConfig(taskset=make_table(python, "counter")))
    assert isinstance(env.taskset, OpenEnv) and env.taskset.server is not None
    server, killed = env.taskset.server, list[int]()

    def kill_after_first_reply(phase: str, calls: int) -> None:
        if phase == "turn" and not killed:
            killed.append(server.pid)
            os.kill(server.pid, signal.SIGKILL)

    async with Gateway() as gateway:
        task, policy = next(env.iter_tasks()), ScriptedPolicy(["letters"] * 10)

        async def run() -> Sequence[Trace]:
            options = {"policy": policy, "gateway": gateway, "id": "killed", "on_progress": kill_after_first_reply}
            return (await run_attempt(env, task, **options)).traces

        (trace,) = await repeat_attempt(run, env)
    assert killed and server.pid not in killed
    assert (trace.stop, trace.errors) == ("done", []), trace.errors
    print(f"   the server was killed and the attempt ran again: {trace.info}", flush=True)
    server.stop()
