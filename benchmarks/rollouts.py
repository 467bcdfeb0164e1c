"""Rollouts: the cost of the framework itself, with an engine in another process that answers at once.

Measured are the CPU time of this process per rollout (chat harness, real HTTP) for one turn, two turns with a simulated
user, and two turns with a tool, for 48 tasks with 16 attempts each, with 16, 64 and 256 concurrent rollouts, and the
lag of the event loop. Targets: 3 ms of CPU for a rollout of two turns, at most 1.3 times that at 256, lag p99 under
20 ms at 256. For comparison, `verifiers` 0.4.0 runs in a second interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _check import REPETITIONS, Row, competitor, finish, parser

import ramify as rf
from ramify.infer.client import InferenceClient
from ramify.infer.gateway import TokenPolicy
from ramify.model.render import Renderer, load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.rollout import Environment, SourceConfig, run_attempt

TASKS, ATTEMPTS = 48, 16
CONCURRENCY = (16, 64, 256)
LAG_INTERVAL = 0.002  # seconds between two measurements of the loop lag
SYSTEM = "You are a careful assistant. Answer inside <answer> tags and think of the units."
QUESTION = "A train leaves at nine and another at ten; which one arrives first, and by how many minutes?"
REPLY = "The first train arrives ten minutes before the second. <answer>the first, by ten minutes</answer>"
CALL = '<tool_call>{"name": "clock", "arguments": {"city": "Bern"}}</tool_call>'


class DoubtingUser(rf.User):
    def respond(self, turn: int) -> str | None:
        return "Are you sure? Check it once more." if turn == 1 else None


class Trains(rf.Taskset):
    """Rollouts of one turn."""

    def load(self) -> Iterator[rf.Task]:
        for number in range(TASKS):
            yield rf.Task(prompt=f"{number}. {QUESTION}", system=SYSTEM, answer="the first, by ten minutes")

    @rf.reward
    def right(self, task: rf.Task, trace: rf.Trace) -> float:
        return float(task.answer in trace.last_reply)


class TrainsWithUser(Trains):
    """Rollouts of two turns, with a simulated user."""

    def user(self) -> rf.User:
        return DoubtingUser()


class TrainsWithTool(Trains):
    """Rollouts of two turns, with a tool."""

    @rf.tool
    def clock(self, city: str) -> str:
        """The time in a city."""
        return f"It is nine in {city}."


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of one run of all rollouts."""

    cpu: float  # milliseconds per rollout
    rate: float  # rollouts per second
    lag: float  # milliseconds, 99th percentile


@contextlib.contextmanager
def start_engine(renderer: Renderer, *, calls: bool) -> Iterator[str]:
    """Start the instant engine and yield its address."""

    def ids(text: str) -> str:
        return json.dumps([*renderer.tokenizer.encode(text, continues_text=True).ids.tolist(), renderer.stop_ids[0]])

    command = [sys.executable, str(Path(__file__).with_name("_instant_engine.py")), "--text", ids(REPLY)]
    command += ["--stop", str(renderer.stop_ids[0]), *(["--call", ids(CALL), "--turns", "3"] if calls else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


async def record_lag(lags: list[float]) -> None:
    """Record repeatedly how much later than requested the loop continues."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL
        await asyncio.sleep(LAG_INTERVAL)
        lags.append(loop.time() - due)


async def measure(url: str, renderer: Renderer, env: Environment, turns: int, concurrency: int) -> Measurement:
    async with InferenceClient(url) as client:
        policy = TokenPolicy(client, renderer, "instant", max_model_len=4096)

        async def work(queue: Iterator[tuple[rf.Task, int]]) -> None:
            for task, attempt in queue:
                name, group = f"{task.identity}.{attempt}", task.identity
                episode = await run_attempt(env, task, policy=policy, id=name, group=group, attempt=attempt)
                (trace,) = episode.traces
                if trace.reward != 1.0 or len(trace.sampled_nodes) != turns or trace.errors:
                    raise AssertionError(
                        f"a rollout failed: {trace.stop}, {trace.errors}, {len(trace.sampled_nodes)} calls"
                    )

        async def run_all(rollouts: list[tuple[rf.Task, int]]) -> None:
            queue = iter(rollouts)
            await asyncio.gather(*(work(queue) for _ in range(concurrency)))

        rollouts = [(task, attempt) for task in env.iter_tasks() for attempt in range(ATTEMPTS)]
        await run_all(rollouts[:concurrency])  # connections are open, templates compiled
        gc.collect()
        lags: list[float] = []
        lag_task = asyncio.create_task(record_lag(lags))
        wall, cpu = time.perf_counter(), time.process_time()
        await run_all(rollouts)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        lag_task.cancel()
        count = len(rollouts)
        return Measurement(1e3 * cpu / count, count / wall, 1e3 * statistics.quantiles(lags, n=100)[98])


def take_medians(measures: list[Measurement]) -> Measurement:
    """Return the medians of several measurements."""
    return Measurement(*(statistics.median(getattr(m, name) for m in measures) for name in ("cpu", "rate", "lag")))


def main() -> int:
    args = parser(__doc__, shown_flags=["--verifiers-python"]).parse_args()
    competitor_rows = competitor(
        args.verifiers_python, "_verifiers_rollouts.py", "verifiers==0.4.0", "--verifiers-python", args.check
    )
    renderer = load_renderer(resolve_model_path("tiny"))
    kinds = {
        "1 turn": (Trains, 1, False),
        "2 turns, user": (TrainsWithUser, 2, False),
        "2 turns, tool": (TrainsWithTool, 2, True),
    }
    medians: dict[tuple[str, int], Measurement] = {}
    for kind, (taskset, turns, calls) in kinds.items():
        env = Environment.load(SourceConfig(taskset={"id": f"{__name__}:{taskset.__name__}"}))
        with start_engine(renderer, calls=calls) as url:
            for concurrency in CONCURRENCY:
                measurements = [
                    asyncio.run(measure(url, renderer, env, turns, concurrency)) for _ in range(REPETITIONS)
                ]
                medians[kind, concurrency] = take_medians(measurements)

    def reference(kind: str, concurrency: int, name: str) -> float | None:
        row: dict[str, Any] = (competitor_rows or {}).get(f"{kind}, {concurrency}", {})
        return row.get(name)

    rows: list[Row] = []
    for (kind, concurrency), median in medians.items():
        name, has_two_turns = f"{kind}, {concurrency} at a time", kind != "1 turn"
        target = 3.0 if has_two_turns and concurrency == CONCURRENCY[0] else None
        rows.append(Row(f"CPU per rollout, {name}", median.cpu, reference(kind, concurrency, "cpu"), "ms", target))
        rows.append(Row(f"rollouts, {name}", median.rate, reference(kind, concurrency, "rate"), "/s", at_least=True))
    for kind in kinds:
        at_256, at_16 = medians[kind, CONCURRENCY[-1]], medians[kind, CONCURRENCY[0]]
        rows.append(Row(f"CPU at 256 / CPU at 16, {kind}", at_256.cpu / at_16.cpu, None, "ratio", 1.3))
        competitor_lag = reference(kind, CONCURRENCY[-1], "lag")
        rows.append(Row(f"loop lag p99 at 256, {kind}", at_256.lag, competitor_lag, "ms", 20.0))
    return finish("benchmarks/rollouts.py: the framework's own cost of a rollout", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
