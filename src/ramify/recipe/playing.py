"""Rollouts of a model directory without a server: the engine runs in this process, under the chat loop of every day."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ramify.client import ClientSampling, Completion
from ramify.client.stall_clock import StallClock
from ramify.gateway.config import SamplingConfig
from ramify.gateway.policy import TokenPolicy
from ramify.infer import Engine, EngineConfig
from ramify.infer import Sampling as Wanted
from ramify.render import ParsedReply, RenderedPrompt, Renderer, load_renderer
from ramify.rollout import Environment, SourceConfig, run_rollout
from ramify.trace import Trace, Usage

AT_ONCE = 64  # rollouts
REPLY = 160  # tokens of one reply in them, at most
T = TypeVar("T")


class Player:
    """A model that can be asked for replies and for whole rollouts."""

    def __init__(self, engine: Engine, renderer: Renderer, name: str) -> None:
        self._engine, self._renderer, self._name = engine, renderer, name

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: ClientSampling,
        *,
        session: str | None = None,
        timeout: float = 600.0,
        clock: StallClock | None = None,
    ) -> Completion:
        """One sample from the engine, as a client of a server would bring it."""
        wanted = Wanted(
            temperature=sampling.temperature,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            stop_ids=frozenset(sampling.stop_ids),
        )
        stream = self._engine.submit(list(prompt), wanted, timeout=timeout)
        done = await stream.result()
        ids, logprobs = np.array(done.tokens, np.int32), np.array(done.logprobs, np.float32)
        usage = Usage(len(prompt), len(ids), done.cached)
        return Completion(ids, logprobs, done.finish or "abort", (), usage, self._name)

    async def replies(self, prompts: Sequence[RenderedPrompt], sampling: ClientSampling) -> list[ParsedReply]:
        """One reply to each prompt, seeded by its place."""
        asked = [replace(sampling, seed=at, stop_ids=self._renderer.stop_ids) for at in range(len(prompts))]
        done = await _together(self.generate(prompt.token_ids.tolist(), how) for prompt, how in zip(prompts, asked))
        return [self._renderer.parse(sample.token_ids, prompt) for sample, prompt in zip(done, prompts)]

    async def rollouts(self, taskset: dict[str, Any], tasks: int, attempts: int, *, seed: int) -> list[list[Trace]]:
        """So many attempts at each of the first tasks of a taskset, at temperature 1, grouped by task."""
        sampling = SamplingConfig(max_tokens=REPLY, seed=seed)
        environment = Environment.load(SourceConfig(taskset=taskset, sampling=sampling))
        policy = TokenPolicy(self, self._renderer, self._name, max_model_len=self._engine.core.max_model_len)
        drawn = list(islice(environment.iter_tasks(), tasks))
        episodes = await _together(
            run_rollout(
                environment, task, policy=policy, id=f"{at}.{attempt}", group=str(at), attempt=attempt, seed=seed
            )
            for at, task in enumerate(drawn)
            for attempt in range(attempts)
        )
        traces = [episode.traces[0] for episode in episodes]
        return [traces[start : start + attempts] for start in range(0, len(traces), attempts)]


@contextmanager
def playing(directory: Path) -> Iterator[Player]:
    """The model of a directory, in float32 on the CPU, while it can be asked."""
    config = EngineConfig(device="cpu", dtype="float32", max_running=AT_ONCE)
    engine = Engine.load(str(directory), config).start()
    try:
        yield Player(engine, load_renderer(directory), directory.name)
    finally:
        engine.close()


async def _together(work: Iterator[Coroutine[Any, Any, T]]) -> list[T]:
    """All of it, a number at once, in its order."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(step: Coroutine[Any, Any, T]) -> T:
        async with room:
            return await step

    return await asyncio.gather(*map(one, work))
