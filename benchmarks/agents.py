"""Agents: rollouts per second of one Python agent that uses the OpenAI SDK, by how it is started.

Measured at 16 rollouts at a time, the start excluded, with an engine in another process that answers at once: the agent
as a program in a sandbox, started from nothing; the same with `harness.preload`; the same code in the worker's process
(`run_agent`); and the chat harness. Target: 8 rollouts per second on two cores with `preload`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
from _check import Row, finish, parser
from _openai_agent import SYSTEM
from rollouts import QUESTION, start_engine

import ramify as rf
from ramify.infer.client import InferenceClient
from ramify.infer.gateway import Gateway, TokenPolicy
from ramify.model.render import Renderer, load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.rollout.runtime.bwrap import find_unsupported_reason

CONCURRENCY = 16
ROUNDS = 3
NUM_ROLLOUTS = {"started from nothing": 32, "preloaded": 128, "run_agent": 256, "chat": 512}  # by how it is started
TARGET = 8.0  # rollouts per second
AGENT = Path(__file__).with_name("_openai_agent.py")
PACKAGES = Path(openai.__file__).parents[1]


class Trains(rf.Taskset):
    """One question, which the engine answers right."""

    def load(self) -> Iterator[rf.Task]:
        yield rf.Task(prompt=QUESTION, system=SYSTEM)

    @rf.reward
    def right(self, trace: rf.Trace) -> float:
        return float("<answer>the first, by ten minutes</answer>" in trace.last_reply)


class TrainsWithAgent(Trains):
    """The same with the agent in the process of the worker."""

    async def run_agent(self, task: rf.Task, endpoint: rf.Endpoint) -> str:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": str(task.prompt)}]
            await client.chat.completions.create(model=endpoint.model, messages=messages)
        return "done"


def build_source(way: str) -> SourceConfig:
    """Return the source of one way to start the agent."""
    taskset = {"id": f"{__name__}:{'TrainsWithAgent' if way == 'run_agent' else 'Trains'}"}
    if way in ("run_agent", "chat"):
        return SourceConfig(taskset=taskset)
    harness: dict[str, Any] = {"id": "program", "command": ["python3", "agent.py"], "prompt": "stdin"}
    harness |= {"copy_files": {"agent.py": str(AGENT)}, "env": {"PYTHONPATH": "/packages"}}
    if way == "preloaded":
        harness["preload"] = ["openai", "openai.resources.chat.completions.completions", "httpcore2"]
    limits = {"memory_mb": None, "max_processes": None}
    runtime = {"id": "sandbox", "read_only": [f"{PACKAGES}:/packages"], "limits": limits}
    return SourceConfig(taskset=taskset, harness=harness, runtime=runtime)


async def measure(url: str, renderer: Renderer, way: str) -> float:
    """Return the rollouts per second of one way, without the first of each slot."""
    env = Environment.load(build_source(way))
    (task,) = env.iter_tasks()
    async with InferenceClient(url) as client, Gateway() as gateway:
        policy = TokenPolicy(client, renderer, "instant", max_model_len=4096)

        async def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                episode = await run_attempt(env, task, policy=policy, id=f"r{number}", gateway=gateway)
                (trace,) = episode.traces
                if trace.reward != 1.0 or trace.errors:
                    raise AssertionError(f"a rollout failed: {trace.stop}, {trace.errors}, {trace.info}")

        async def run_all(count: int) -> None:
            numbers = iter(range(count))
            await asyncio.gather(*(work(numbers) for _ in range(CONCURRENCY)))

        try:
            await run_all(CONCURRENCY)
            start = time.perf_counter()
            await run_all(NUM_ROLLOUTS[way])
            return NUM_ROLLOUTS[way] / (time.perf_counter() - start)
        finally:
            await env.close()


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--ways", nargs="+", choices=list(NUM_ROLLOUTS), default=list(NUM_ROLLOUTS))
    args = flags.parse_args()
    if reason := find_unsupported_reason():
        print(f"not measured: no sandbox here: {reason}")
        return 0
    renderer = load_renderer(resolve_model_path("tiny"))
    rates: dict[str, list[float]] = {way: [] for way in args.ways}
    with start_engine(renderer, calls=False) as url:
        for _ in range(ROUNDS):
            for way in args.ways:
                rates[way].append(asyncio.run(measure(url, renderer, way)))
                print(f"{way}: {rates[way][-1]:.1f} /s, load {os.getloadavg()[0]:.1f}")
    medians = {way: statistics.median(values) for way, values in rates.items()}
    reference = medians.get("started from nothing")
    rows = [
        Row(
            f"rollouts, {CONCURRENCY} at a time, {way}",
            median,
            None if way == "started from nothing" else reference,
            "/s",
            TARGET if way == "preloaded" else None,
            at_least=True,
        )
        for way, median in medians.items()
    ]
    return finish("benchmarks/agents.py: an agent with the OpenAI SDK, by how it is started", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
