"""Env servers: time to the first rollout, throughput, and latency added to a rollout.

Rollouts of two turns against an engine in another process that answers after 0.2 s. Measured are the time from the
start of the command to the first rollout; 200 concurrent rollouts with 2 workers; rollouts and bytes per second with 1,
2 and 4 workers; and how much longer a rollout takes than in process: each task runs once through the server and once in
the client's process, alternately, four at a time. For comparison, `verifiers` 0.4.0 runs in a second interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path

from _check import Row, competitor, finish, parser

from ramify.env import Task
from ramify.infer.client import InferenceClient
from ramify.infer.gateway import Gateway, TokenPolicy
from ramify.model.render import load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.rollout.envserver import EnvClient, EnvServerConfig, EnvServerProcess
from ramify.trace import Episode, encode_episode

ENGINE_DELAY = 0.2
ROLLOUTS = 200
SUSTAINED, CONCURRENCY = 1000, 256
LONG_REPEAT = 200  # repetitions of the question in a prompt, to measure bytes per second
LATENCY_CONCURRENCY = 4  # concurrent rollouts while latency is measured, started at even intervals
WORKERS = (1, 2, 4)
TASKSET = Path(__file__).with_name("_two_turn_taskset.py")
REPLY = "The first train arrives ten minutes before the second. <answer>the first, by ten minutes</answer>"


@contextlib.contextmanager
def start_engine(delay: float = ENGINE_DELAY, max_model_len: int = 1 << 20) -> Iterator[str]:
    """Start the delayed engine and yield its address."""
    renderer = load_renderer(resolve_model_path("tiny"))
    ids = [*renderer.tokenizer.encode(REPLY, continues_text=True).ids.tolist(), renderer.stop_ids[0]]
    command = [sys.executable, str(Path(__file__).with_name("_instant_engine.py")), "--text", json.dumps(ids)]
    command += ["--stop", str(renderer.stop_ids[0]), "--late", str(delay)]
    command += ["--card", json.dumps({"id": "tiny", "max_model_len": max_model_len})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def source(repeat: int = 1) -> SourceConfig:
    return SourceConfig(taskset={"id": str(TASKSET), "repeat": repeat})


@contextlib.asynccontextmanager
async def serve(url: str, folder: Path, workers: int, repeat: int = 1) -> AsyncIterator[EnvClient]:
    """Start a server with `workers` workers and yield a client."""
    config = EnvServerConfig.model_validate(
        {
            "train": [{**source(repeat).model_dump(mode="json"), "pool": {"type": "static", "workers": workers}}],
            "model": {"name": "tiny"},
            "inference": {"engine": "external", "base_url": [url]},
            "output": folder,
            "shutdown_timeout": 0.0,
        }
    )
    async with EnvServerProcess(config, folder / "config.toml") as child, EnvClient(child.address) as client:
        yield client


async def wait_for_workers(client: EnvClient, workers: int) -> None:
    while sum(worker.state == "ready" for worker in (await client.health()).workers) < workers:
        await asyncio.sleep(0.05)


def tasks(repeat: int, count: int) -> list[Task]:
    return list(islice(Environment.load(source(repeat)).iter_tasks(), count))


def check_episode(episode: Episode) -> None:
    (trace,) = episode.traces
    if trace.reward != 1.0 or len(trace.sampled_nodes) != 2:
        raise AssertionError(f"a rollout failed: {trace.stop}, {trace.errors}")


async def run_all(client: EnvClient, pending: list[Task], concurrency: int) -> tuple[float, int]:
    """Run all tasks; return the seconds and the bytes of their episodes."""
    queue, size = iter(enumerate(pending)), 0

    async def work() -> None:
        nonlocal size
        for number, task in queue:
            result = await client.run(task, id=f"r{number}", timeout=300)
            size += len(result.encoded_episode)
            check_episode(result.episode)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return time.perf_counter() - start, size


async def measure_latencies(url: str, client: EnvClient, pending: list[Task]) -> tuple[list[float], list[float]]:
    """Return the seconds of each rollout through the server and in process, up to its encoded episode."""
    env, queue = Environment.load(source()), iter(enumerate(pending))
    served: list[float] = []
    local: list[float] = []
    async with InferenceClient(url) as inference, Gateway() as gateway:
        policy = TokenPolicy(inference, load_renderer(resolve_model_path("tiny")), "tiny", max_model_len=1 << 20)

        async def run_served(task: Task, id: str) -> None:
            start = time.perf_counter()
            result = await client.run(task, id=id, timeout=300)
            served.append(time.perf_counter() - start)
            check_episode(result.episode)

        async def run_local(task: Task, id: str) -> None:
            start = time.perf_counter()
            episode = await run_attempt(env, task, policy=policy, gateway=gateway, id=id)
            encode_episode(episode)
            local.append(time.perf_counter() - start)
            check_episode(episode)

        async def work(position: int) -> None:
            await asyncio.sleep(2 * ENGINE_DELAY * position / LATENCY_CONCURRENCY)
            for number, task in queue:
                for run in (run_served, run_local) if number % 2 else (run_local, run_served):
                    await run(task, f"r{number}")

        for run in (run_served, run_local):
            await asyncio.gather(
                *(run(task, f"w{number}") for number, task in enumerate(pending[:LATENCY_CONCURRENCY]))
            )
        served.clear()
        local.clear()
        await asyncio.gather(*(work(position) for position in range(LATENCY_CONCURRENCY)))
    return served, local


async def time_first_rollout(url: str, folder: Path) -> float:
    """Return the seconds from the start of the command to the first rollout's result."""
    start = time.perf_counter()
    async with serve(url, folder, 2) as client:
        await client.run(tasks(1, 1)[0], id="first")
        return time.perf_counter() - start


async def measure(url: str, folder: Path) -> list[tuple[str, float, str, float | None, bool]]:
    rows: list[tuple[str, float, str, float | None, bool]] = []
    starts = [await time_first_rollout(url, folder) for _ in range(4)][1:]  # the first one writes bytecode
    rows.append(("start to first rollout", statistics.median(starts), "s", 3.0, False))
    pending = tasks(1, SUSTAINED)
    for workers in WORKERS:
        async with serve(url, folder, workers) as client:
            await wait_for_workers(client, workers)
            await run_all(client, pending[:32], 32)
            if workers == 2:
                burst = [(await run_all(client, pending[:ROLLOUTS], ROLLOUTS))[0] for _ in range(3)]
                rows.append((f"{ROLLOUTS} rollouts at once, 2 workers", statistics.median(burst), "s", 3.0, False))
            seconds, _ = await run_all(client, pending, CONCURRENCY)
            rows.append((f"rollouts, {workers} workers", SUSTAINED / seconds, "/s", None, True))
        async with serve(url, folder, workers, LONG_REPEAT) as client:
            await wait_for_workers(client, workers)
            long = tasks(LONG_REPEAT, ROLLOUTS)
            await run_all(client, long[:16], 16)
            seconds, size = await run_all(client, long, ROLLOUTS)
            name = f"episodes of {size / ROLLOUTS / 1e3:.0f} kB, {workers} workers"
            rows.append((name, size / 1e6 / seconds, "MB/s", None, True))
    async with serve(url, folder, 1) as client:
        times = [await measure_latencies(url, client, pending[:ROLLOUTS]) for _ in range(3)]
    for percent, target in ((50, 3.0), (99, 20.0)):
        added = [percentile(served, percent) - percentile(local, percent) for served, local in times]
        rows.append((f"added to a rollout, p{percent}", 1e3 * statistics.median(added), "ms", target, False))
    return rows


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def main() -> int:
    args = parser(__doc__, shown_flags=["--verifiers-python"]).parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    competitor_rows = competitor(
        args.verifiers_python, "_verifiers_envserver.py", "verifiers==0.4.0", "--verifiers-python", args.check
    )
    with start_engine() as url, tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(url, Path(folder)))
    rows = [
        Row(name, value, (competitor_rows or {}).get(name), unit, target, at_least)
        for name, value, unit, target, at_least in measured
    ]
    return finish("benchmarks/envserver.py: rollouts through an env server", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
