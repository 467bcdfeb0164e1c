"""Env servers: how soon they serve, how much they carry, and what they add to a rollout.

Against an engine in another process that answers after 0.2 s, rollouts of two turns: from the start of the command to
the first rollout; 200 rollouts at the same time with 2 workers; rollouts and bytes a second at 1, 2 and 4 workers; and
how much longer a rollout takes than in process: each task once through the server and once in the process of its
client, in turns, four at a time. Beside it `verifiers` 0.4.0 in a second interpreter.
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

from ramify.client import InferenceClient
from ramify.env import Task
from ramify.envserver import EnvClient, EnvServerConfig, EnvServerProcess
from ramify.gateway import Gateway, TokenPolicy
from ramify.model.resolve import resolve_model_path
from ramify.render import load_renderer
from ramify.rollout import Environment, SourceConfig, run_rollout
from ramify.trace import Episode, encode_episode

LATE = 0.2
ROLLOUTS = 200
SUSTAINED, CONCURRENCY = 1000, 256
LONG = 200  # times the question stands in a prompt, for bytes a second
FEW = 4  # rollouts at the same time where latency is measured, evenly apart
WORKERS = (1, 2, 4)
TASKSET = Path(__file__).with_name("_trains.py")
REPLY = "The first train arrives ten minutes before the second. <answer>the first, by ten minutes</answer>"


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """The late engine, and its address."""
    renderer = load_renderer(resolve_model_path("tiny"))
    ids = [*renderer.tokenizer.encode(REPLY, continues_text=True).ids.tolist(), renderer.stop_ids[0]]
    command = [sys.executable, str(Path(__file__).with_name("_instant.py")), "--text", json.dumps(ids)]
    command += ["--stop", str(renderer.stop_ids[0]), "--late", str(LATE)]
    command += ["--card", json.dumps({"id": "tiny", "max_model_len": 1 << 20})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def source(repeat: int = 1) -> SourceConfig:
    return SourceConfig(taskset={"id": str(TASKSET), "repeat": repeat})


@contextlib.asynccontextmanager
async def serving(url: str, folder: Path, workers: int, repeat: int = 1) -> AsyncIterator[EnvClient]:
    """A server with so many workers, and a client."""
    config = EnvServerConfig.model_validate(
        {
            "train": [{**source(repeat).model_dump(mode="json"), "pool": {"type": "static", "workers": workers}}],
            "model": {"name": "tiny"},
            "inference": {"engine": "external", "base_url": [url]},
            "output": folder,
            "grace": 0.0,
        }
    )
    async with EnvServerProcess(config, folder / "config.toml") as child, EnvClient(child.address) as client:
        yield client


async def ready(client: EnvClient, workers: int) -> None:
    while sum(worker.state == "ready" for worker in (await client.health()).workers) < workers:
        await asyncio.sleep(0.05)


def tasks(repeat: int, count: int) -> list[Task]:
    return list(islice(Environment.load(source(repeat)).iter_tasks(), count))


def check(episode: Episode) -> None:
    (trace,) = episode.traces
    if trace.reward != 1.0 or len(trace.sampled_nodes) != 2:
        raise AssertionError(f"a rollout went wrong: {trace.stop}, {trace.errors}")


async def through(client: EnvClient, todo: list[Task], concurrency: int) -> tuple[float, int]:
    """Seconds for all rollouts, and bytes of their episodes."""
    waiting, size = iter(enumerate(todo)), 0

    async def work() -> None:
        nonlocal size
        for number, task in waiting:
            done = await client.run(task, id=f"r{number}", timeout=300)
            size += len(done.encoded_episode)
            check(done.episode)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return time.perf_counter() - start, size


async def both_ways(url: str, client: EnvClient, todo: list[Task]) -> tuple[list[float], list[float]]:
    """Seconds of each rollout through the server and of the same in process, both to its encoded episode."""
    env, waiting = Environment.load(source()), iter(enumerate(todo))
    served: list[float] = []
    local: list[float] = []
    async with InferenceClient(url) as engine, Gateway() as gateway:
        policy = TokenPolicy(engine, load_renderer(resolve_model_path("tiny")), "tiny", max_model_len=1 << 20)

        async def there(task: Task, id: str) -> None:
            start = time.perf_counter()
            done = await client.run(task, id=id, timeout=300)
            served.append(time.perf_counter() - start)
            check(done.episode)

        async def here(task: Task, id: str) -> None:
            start = time.perf_counter()
            episode = await run_rollout(env, task, policy=policy, gateway=gateway, id=id)
            encode_episode(episode)
            local.append(time.perf_counter() - start)
            check(episode)

        async def work(at: int) -> None:
            await asyncio.sleep(2 * LATE * at / FEW)
            for number, task in waiting:
                for way in (there, here) if number % 2 else (here, there):
                    await way(task, f"r{number}")

        for way in (there, here):
            await asyncio.gather(*(way(task, f"w{number}") for number, task in enumerate(todo[:FEW])))
        served.clear()
        local.clear()
        await asyncio.gather(*(work(at) for at in range(FEW)))
    return served, local


async def first(url: str, folder: Path) -> float:
    """Seconds from the start of the command to the first rollout's result."""
    start = time.perf_counter()
    async with serving(url, folder, 2) as client:
        await client.run(tasks(1, 1)[0], id="first")
        return time.perf_counter() - start


async def measure(url: str, folder: Path) -> list[tuple[str, float, str, float | None, bool]]:
    rows: list[tuple[str, float, str, float | None, bool]] = []
    starts = [await first(url, folder) for _ in range(4)][1:]  # the first one writes bytecode
    rows.append(("start to first rollout", statistics.median(starts), "s", 3.0, False))
    todo = tasks(1, SUSTAINED)
    for workers in WORKERS:
        async with serving(url, folder, workers) as client:
            await ready(client, workers)
            await through(client, todo[:32], 32)
            if workers == 2:
                burst = [(await through(client, todo[:ROLLOUTS], ROLLOUTS))[0] for _ in range(3)]
                rows.append((f"{ROLLOUTS} rollouts at once, 2 workers", statistics.median(burst), "s", 3.0, False))
            seconds, _ = await through(client, todo, CONCURRENCY)
            rows.append((f"rollouts, {workers} workers", SUSTAINED / seconds, "/s", None, True))
        async with serving(url, folder, workers, LONG) as client:
            await ready(client, workers)
            long = tasks(LONG, ROLLOUTS)
            await through(client, long[:16], 16)
            seconds, size = await through(client, long, ROLLOUTS)
            name = f"episodes of {size / ROLLOUTS / 1e3:.0f} kB, {workers} workers"
            rows.append((name, size / 1e6 / seconds, "MB/s", None, True))
    async with serving(url, folder, 1) as client:
        times = [await both_ways(url, client, todo[:ROLLOUTS]) for _ in range(3)]
    for percent, target in ((50, 3.0), (99, 20.0)):
        added = [quantile(served, percent) - quantile(local, percent) for served, local in times]
        rows.append((f"added to a rollout, p{percent}", 1e3 * statistics.median(added), "ms", target, False))
    return rows


def quantile(each: list[float], percent: int) -> float:
    return statistics.quantiles(each, n=100)[percent - 1]


def main() -> int:
    args = parser(__doc__.splitlines()[0]).parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    theirs = competitor(
        args.verifiers_python, "_verifiers_envserver.py", "verifiers==0.4.0", "--verifiers-python", args.check
    )
    with engine() as url, tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(url, Path(folder)))
    rows = [Row(name, got, (theirs or {}).get(name), unit, target, more) for name, got, unit, target, more in found]
    return finish("benchmarks/envserver.py: rollouts through an env server", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
