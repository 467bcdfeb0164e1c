"""The token client's interface without a network: it says what it is told to, and remembers what it was asked."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ramify.client import ClientSampling, Completion
from ramify.client.stall_clock import StallClock
from ramify.gateway import ModelRequest, RolloutLimits, RolloutSession, SamplingConfig, TokenPolicy
from ramify.trace import Message, Trace, Usage, VersionRun
from tests.gateway.engine import TINY


class Sampler:
    """Answers with the next text of `script`; an exception in it is raised."""

    def __init__(self, script: Sequence[str | Exception] | Callable[[str], str], renderer=TINY) -> None:
        self.script = script if callable(script) else list(script)
        self.renderer = renderer
        self.seen: list[tuple[list[int], list[int], list[float]]] = []
        self.asked: list[ClientSampling] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: ClientSampling,
        *,
        session: str | None = None,
        timeout: float = 600.0,
        clock: StallClock | None = None,
    ) -> Completion:
        self.asked.append(sampling)
        await self.gate.wait()
        tokenizer = self.renderer.tokenizer
        text = self.script(tokenizer.decode(prompt)) if callable(self.script) else self.script.pop(0)
        if isinstance(text, Exception):
            raise text
        whole = [*tokenizer.encode(text, continues_text=True).ids.tolist(), self.renderer.stop_ids[0]]
        ids = whole[: sampling.max_tokens]
        logprobs = [-0.125 * (1 + (7 * at + len(prompt)) % 13) for at in range(len(ids))]
        self.seen.append((list(prompt), ids, logprobs))
        half = len(ids) // 2
        runs = [VersionRun("tiny", 0, 1, half), VersionRun("tiny", 0, 2, len(ids) - half)]
        return Completion(
            np.array(ids, np.int32),
            np.array(logprobs, np.float32),
            "stop" if len(ids) == len(whole) else "length",
            tuple(run for run in runs if run.count),
            Usage(len(prompt), len(ids)),
            "here",
        )


def session_of(
    script, *, renderer=TINY, limits: dict[str, int] | None = None, **options: Any
) -> tuple[RolloutSession, Sampler]:
    sampler = Sampler(script, renderer)
    sampling = options.pop("sampling", SamplingConfig())
    policy = TokenPolicy(sampler, renderer, "tiny", max_model_len=options.pop("max_model_len", None))
    session = RolloutSession(
        Trace(id="t1"), policy, sampling=sampling, limits=RolloutLimits(**(limits or {})), **options
    )
    return session, sampler


def user(text: str, **more: Any) -> ModelRequest:
    return ModelRequest((Message("user", text),), **more)
