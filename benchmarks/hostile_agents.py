"""Hostile agents in sandboxes among honest ones: what the honest ones and the worker notice of them.

200 rollouts, 32 at once, on one worker of an env server, with an engine in another process that answers after 4 s.
One agent in five is hostile: it writes to every open file that it finds, opens 250 connections with slow bodies of
25 MB, lets the gateway count the tokens of texts of up to 32 MB, leaves orphans, or sends signals to all processes. For
comparison, the same rollouts with honest agents in their place. Both run twice, alternately. Targets: scores and median
times of the honest agents within 20 %, peak memory of the worker under 1.5 GB, no zombies, nothing written to the
machine's disk.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from _check import Row, finish, parser
from _hostile_taskset import ATTACKS, HONEST, HOSTILE_SHARE, NUM_TASKS
from envserver import start_engine, wait_for_workers

from ramify.core.errors import RamifyError
from ramify.env import Task
from ramify.env.runtime import CAPABILITY_OF_LIMIT
from ramify.rollout import Environment, SourceConfig
from ramify.rollout.envserver import EnvClient, EnvServerConfig, EnvServerProcess
from ramify.rollout.runtime.bwrap import find_capabilities, find_unsupported_reason

CONCURRENCY = 32
MAX_MODEL_LEN = 32_768
ENGINE_DELAY = 4.0  # seconds
LIMITS = {"memory_mb": 2048, "max_processes": 512, "cpus": 0.25, "disk_mb": 64}
ROUNDS = 2
TOLERANCE = 0.2
MAX_WORKER_MB = 1500.0
ROLLOUT_TIMEOUT = 300.0  # seconds
HERE = Path(__file__).parent


@dataclass(slots=True)
class Measurement:
    """What was measured with hostile agents, or without, in all rounds."""

    seconds: list[float] = field(default_factory=list[float])  # of each honest rollout
    scores: list[float] = field(default_factory=list[float])
    outcomes: Counter[str] = field(default_factory=Counter[str])  # of hostile rollouts
    disk_bytes: int = 0  # that a hostile agent wrote to files of the machine
    worker_mb: float = 0.0  # at its peak
    worker_seconds: float = 0.0  # of CPU time
    num_zombies: int = 0
    num_lost_workers: int = 0


def build_source(attacks: Sequence[str]) -> SourceConfig:
    available = find_capabilities().available
    limits = {name: value if CAPABILITY_OF_LIMIT[name] in available else None for name, value in LIMITS.items()}
    return SourceConfig.model_validate(
        {
            "taskset": {"id": str(HERE / "_hostile_taskset.py"), "attacks": list(attacks)},
            "harness": {
                "id": "program",
                "command": ["python3", "agent.py"],
                "prompt": "stdin",
                "copy_files": {"agent.py": str(HERE / "_hostile_agent.py")},
            },
            "runtime": {"id": "sandbox", "limits": limits},
        }
    )


async def measure(url: str, folder: Path, attacks: Sequence[str], into: Measurement) -> None:
    """Run all rollouts once on a new server."""
    source = build_source(attacks)
    config = EnvServerConfig.model_validate(
        {
            "train": [{**source.model_dump(mode="json"), "pool": {"type": "static", "workers": 1}}],
            "model": {"name": "tiny"},
            "inference": {"engine": "external", "base_url": [url]},
            "output": folder,
            "shutdown_timeout": 0.0,
        }
    )
    tasks = enumerate(Environment.load(source).iter_tasks())

    async def work(client: EnvClient) -> None:
        for number, task in tasks:
            await run_one(client, task, f"r{number}", into)

    async with EnvServerProcess(config, folder / "config.toml") as server, EnvClient(server.address) as client:
        await wait_for_workers(client, 1)
        pid = (await client.health()).workers[0].pid
        await asyncio.gather(*(work(client) for _ in range(CONCURRENCY)))
        into.num_lost_workers += len((await client.health()).deaths)
        into.worker_mb = max(into.worker_mb, read_peak_memory(pid))
        into.worker_seconds += sum(psutil.Process(pid).cpu_times()[:2])
        into.num_zombies += sum(is_zombie(process) for process in psutil.Process().children(recursive=True))


async def run_one(client: EnvClient, task: Task, id: str, into: Measurement) -> None:
    """Run one rollout, and record it."""
    kind = str(task.prompt).split()[0]
    start = time.perf_counter()
    try:
        (trace,) = (await client.run(task, id=id, timeout=ROLLOUT_TIMEOUT)).episode.traces
    except RamifyError as error:
        into.outcomes[f"{kind}: {error.name}"] += 1
        return
    if kind == HONEST and trace.reward is not None:
        into.seconds.append(time.perf_counter() - start)
        into.scores.append(trace.reward)
        return
    into.outcomes[f"{kind}: {trace.errors[0].name if trace.errors else trace.stop}"] += 1
    if kind == "disk":
        into.disk_bytes += int(trace.info["program"]["stdout"])


def read_peak_memory(pid: int) -> float:
    """Return the most memory that a process has had, in MB; 0 if it is gone."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), 0.0)


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def measure_all(attacks: Sequence[str]) -> tuple[Measurement, Measurement]:
    """Return the measurements with hostile agents and without."""
    hostile, honest = Measurement(), Measurement()
    with start_engine(ENGINE_DELAY, MAX_MODEL_LEN) as url, tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            await measure(url, Path(folder) / f"honest{number}", [], honest)
            await measure(url, Path(folder) / f"hostile{number}", attacks, hostile)
    return hostile, honest


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS, help="what hostile agents do")
    args = flags.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if reason := find_unsupported_reason():
        print(f"not measured: no sandbox here: {reason}")
        return 0
    hostile, honest = asyncio.run(measure_all(args.attacks))
    print(", ".join(f"{count} x {name}" for name, count in sorted(hostile.outcomes.items())))
    score, honest_score = (statistics.fmean(measured.scores or [0.0]) for measured in (hostile, honest))
    deciles, honest_deciles = (statistics.quantiles(measured.seconds, n=10) for measured in (hostile, honest))
    expected = ROUNDS * (NUM_TASKS - NUM_TASKS // HOSTILE_SHARE)
    rows = [
        Row("honest rollouts", len(hostile.scores), None, "", expected, exactly=True),
        Row("score of honest agents", score, honest_score, "", (1 - TOLERANCE) * honest_score, at_least=True),
        Row(
            "time of an honest rollout, median", deciles[4], honest_deciles[4], "s", (1 + TOLERANCE) * honest_deciles[4]
        ),
        Row("time of an honest rollout, p90", deciles[8], honest_deciles[8], "s"),
        Row("peak memory of the worker", hostile.worker_mb, honest.worker_mb, "MB", MAX_WORKER_MB),
        Row("CPU time of the worker", hostile.worker_seconds, honest.worker_seconds, "s"),
        Row("workers lost", hostile.num_lost_workers, honest.num_lost_workers, "", 0),
        Row("zombies", hostile.num_zombies, honest.num_zombies, "", 0),
        Row("bytes written to the machine's disk", hostile.disk_bytes, None, "", 0),
    ]
    title = f"benchmarks/hostile_agents.py: {NUM_TASKS} rollouts, {CONCURRENCY} at once, with hostile agents among them"
    return finish(title, rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
