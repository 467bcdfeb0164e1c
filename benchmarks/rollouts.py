"""Rollouts: what the framework itself costs, against an engine that answers at once in another process.

CPU of this process per rollout, chat harness, over real HTTP: one turn, two turns with a simulated user, two turns with
a tool; 48 tasks with 16 attempts each; 16, 64 and 256 rollouts at the same time; and how late the event loop is.
Targets: 3 ms of CPU for a rollout of two turns, at most 1.3 times that at 256, lag p99 under 20 ms at 256. Beside it
`verifiers` 0.4.0 in a second interpreter.
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
from ramify.client import InferenceClient
from ramify.gateway import TokenPolicy
from ramify.model.resolve import resolve_model_path
from ramify.render import Renderer, load_renderer
from ramify.rollout import Environment, SourceConfig, run_attempt

TASKS, ATTEMPTS = 48, 16
CONCURRENCY = (16, 64, 256)
TICK = 0.002  # seconds between two looks at the loop
SYSTEM = "You are a careful assistant. Answer inside <answer> tags and think of the units."
QUESTION = "A train leaves at nine and another at ten; which one arrives first, and by how many minutes?"
REPLY = "The first train arrives ten minutes before the second. <answer>the first, by ten minutes</answer>"
CALL = '<tool_call>{"name": "clock", "arguments": {"city": "Bern"}}</tool_call>'


class Doubt(rf.User):
    def respond(self, turn: int) -> str | None:
        return "Are you sure? Check it once more." if turn == 1 else None


class Trains(rf.Taskset):
    """One turn."""

    def load(self) -> Iterator[rf.Task]:
        for number in range(TASKS):
            yield rf.Task(prompt=f"{number}. {QUESTION}", system=SYSTEM, answer="the first, by ten minutes")

    @rf.reward
    def right(self, task: rf.Task, trace: rf.Trace) -> float:
        return float(task.answer in trace.last_reply)


class Doubted(Trains):
    """Two turns, with a user."""

    def user(self) -> rf.User:
        return Doubt()


class Timed(Trains):
    """Two turns, with a tool."""

    @rf.tool
    def clock(self, city: str) -> str:
        """The time in a city."""
        return f"It is nine in {city}."


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of all rollouts."""

    cpu: float  # milliseconds per rollout
    rate: float  # rollouts per second
    lag: float  # milliseconds, 99th percentile


@contextlib.contextmanager
def engine(renderer: Renderer, *, calls: bool) -> Iterator[str]:
    """The instant engine, and its address."""

    def ids(text: str) -> str:
        return json.dumps([*renderer.tokenizer.encode(text, continues_text=True).ids.tolist(), renderer.stop_ids[0]])

    command = [sys.executable, str(Path(__file__).with_name("_instant.py")), "--text", ids(REPLY)]
    command += ["--stop", str(renderer.stop_ids[0]), *(["--call", ids(CALL), "--turns", "3"] if calls else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


async def lateness(late: list[float]) -> None:
    """How much later than asked for the loop comes back, again and again."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TICK
        await asyncio.sleep(TICK)
        late.append(loop.time() - due)


async def measure(url: str, renderer: Renderer, env: Environment, turns: int, concurrency: int) -> Measured:
    async with InferenceClient(url) as client:
        policy = TokenPolicy(client, renderer, "instant", max_model_len=4096)

        async def work(waiting: Iterator[tuple[rf.Task, int]]) -> None:
            for task, attempt in waiting:
                name, group = f"{task.identity}.{attempt}", task.identity
                episode = await run_attempt(env, task, policy=policy, id=name, group=group, attempt=attempt)
                (trace,) = episode.traces
                if trace.reward != 1.0 or len(trace.sampled_nodes) != turns or trace.errors:
                    raise AssertionError(
                        f"a rollout went wrong: {trace.stop}, {trace.errors}, {len(trace.sampled_nodes)} calls"
                    )

        async def all_of(rollouts: list[tuple[rf.Task, int]]) -> None:
            waiting = iter(rollouts)
            await asyncio.gather(*(work(waiting) for _ in range(concurrency)))

        rollouts = [(task, attempt) for task in env.iter_tasks() for attempt in range(ATTEMPTS)]
        await all_of(rollouts[:concurrency])  # connections are open, templates compiled
        gc.collect()
        late: list[float] = []
        looking = asyncio.create_task(lateness(late))
        wall, cpu = time.perf_counter(), time.process_time()
        await all_of(rollouts)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        looking.cancel()
        count = len(rollouts)
        return Measured(1e3 * cpu / count, count / wall, 1e3 * statistics.quantiles(late, n=100)[98])


def middle(measures: list[Measured]) -> Measured:
    """The medians of several runs."""
    return Measured(*(statistics.median(getattr(m, name) for m in measures) for name in ("cpu", "rate", "lag")))


def main() -> int:
    args = parser(__doc__.splitlines()[0]).parse_args()
    theirs = competitor(
        args.verifiers_python, "_verifiers_rollouts.py", "verifiers==0.4.0", "--verifiers-python", args.check
    )
    renderer = load_renderer(resolve_model_path("tiny"))
    kinds = {"1 turn": (Trains, 1, False), "2 turns, user": (Doubted, 2, False), "2 turns, tool": (Timed, 2, True)}
    found: dict[tuple[str, int], Measured] = {}
    for kind, (taskset, turns, calls) in kinds.items():
        env = Environment.load(SourceConfig(taskset={"id": f"{__name__}:{taskset.__name__}"}))
        with engine(renderer, calls=calls) as url:
            for concurrency in CONCURRENCY:
                runs = [asyncio.run(measure(url, renderer, env, turns, concurrency)) for _ in range(REPETITIONS)]
                found[kind, concurrency] = middle(runs)

    def reference(kind: str, concurrency: int, name: str) -> float | None:
        entry: dict[str, Any] = (theirs or {}).get(f"{kind}, {concurrency}", {})
        return entry.get(name)

    rows: list[Row] = []
    for (kind, concurrency), got in found.items():
        name, two = f"{kind}, {concurrency} at a time", kind != "1 turn"
        target = 3.0 if two and concurrency == CONCURRENCY[0] else None
        rows.append(Row(f"CPU per rollout, {name}", got.cpu, reference(kind, concurrency, "cpu"), "ms", target))
        rows.append(Row(f"rollouts, {name}", got.rate, reference(kind, concurrency, "rate"), "/s", at_least=True))
    for kind in kinds:
        most, least = found[kind, CONCURRENCY[-1]], found[kind, CONCURRENCY[0]]
        rows.append(Row(f"CPU at 256 / CPU at 16, {kind}", most.cpu / least.cpu, None, "ratio", 1.3))
        theirs_lag = reference(kind, CONCURRENCY[-1], "lag")
        rows.append(Row(f"loop lag p99 at 256, {kind}", most.lag, theirs_lag, "ms", 20.0))
    return finish("benchmarks/rollouts.py: the framework's own cost of a rollout", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
