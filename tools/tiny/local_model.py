"""Rollouts of a model directory with an in-process engine and the normal chat harness."""

import asyncio
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from ramify.infer import Engine, EngineConfig, SamplingParams
from ramify.infer.client import ClientSampling, Completion
from ramify.infer.client.generate_messages import RequestImage
from ramify.infer.client.stall_clock import StallClock
from ramify.infer.gateway.config import SamplingConfig
from ramify.infer.gateway.policy import TokenPolicy
from ramify.infer.images import ImageReference
from ramify.model.render import ParsedReply, RenderedPrompt, Renderer, load_renderer
from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.trace import Trace, Usage

MAX_CONCURRENT = 64
MAX_REPLY_TOKENS = 160
T = TypeVar("T")


class LocalModel:
    """A model that samples replies and runs rollouts."""

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
        images: Sequence[RequestImage] = (),
    ) -> Completion:
        """Return one sample of the engine as a client would."""
        params = SamplingParams(
            temperature=sampling.temperature,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            stop_ids=frozenset(sampling.stop_ids),
        )
        for image in images:
            self._engine.upload_image(await image.load())
        references = [ImageReference(image.hash, image.start, image.stop) for image in images]
        stream = self._engine.submit(list(prompt), params, timeout=timeout, images=references)
        done = await stream.result()
        ids, logprobs = np.array(done.token_ids, np.int32), np.array(done.logprobs, np.float32)
        usage = Usage(len(prompt), len(ids), done.num_cached_tokens)
        return Completion(ids, logprobs, (), done.finish_reason or "abort", usage, self._name)

    async def sample_replies(self, prompts: Sequence[RenderedPrompt], sampling: ClientSampling) -> list[ParsedReply]:
        """Return one reply to each prompt, seeded by its index."""
        samplings = [
            msgspec.structs.replace(sampling, seed=index, stop_ids=self._renderer.stop_ids)
            for index in range(len(prompts))
        ]
        done = await _gather_bounded(
            self.generate(prompt.token_ids.tolist(), sampling) for prompt, sampling in zip(prompts, samplings)
        )
        return [self._renderer.parse(sample.token_ids, prompt) for sample, prompt in zip(done, prompts)]

    async def run_rollouts(
        self, taskset: dict[str, Any], num_tasks: int, num_attempts: int, *, seed: int
    ) -> list[list[Trace]]:
        """Run rollouts of the first tasks of a taskset at temperature 1; return their traces grouped by task."""
        sampling = SamplingConfig(max_tokens=MAX_REPLY_TOKENS, seed=seed)
        environment = Environment.load(SourceConfig(taskset=taskset, sampling=sampling))
        policy = TokenPolicy(self, self._renderer, self._name, max_model_len=self._engine.core.max_model_len)
        tasks = list(islice(environment.iter_tasks(), num_tasks))
        episodes = await _gather_bounded(
            run_attempt(
                environment, task, policy=policy, id=f"{index}.{attempt}", group=str(index), attempt=attempt, seed=seed
            )
            for index, task in enumerate(tasks)
            for attempt in range(num_attempts)
        )
        traces = [episode.traces[0] for episode in episodes]
        return [traces[start : start + num_attempts] for start in range(0, len(traces), num_attempts)]


@contextmanager
def open_local_model(directory: Path) -> Generator[LocalModel]:
    """Load the model of a directory in float32 on the CPU; close its engine on exit."""
    config = EngineConfig(device="cpu", dtype="float32", max_running_requests=MAX_CONCURRENT)
    engine = Engine.load(str(directory), config).start()
    try:
        yield LocalModel(engine, load_renderer(directory), directory.name)
    finally:
        engine.close()


async def _gather_bounded(coroutines: Iterator[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all coroutines, MAX_CONCURRENT at a time, and return their results in order."""
    semaphore = asyncio.Semaphore(MAX_CONCURRENT)

    async def run_one(coroutine: Coroutine[Any, Any, T]) -> T:
        async with semaphore:
            return await coroutine

    return await asyncio.gather(*map(run_one, coroutines))
