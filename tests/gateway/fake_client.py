"""A fake token client without a network: it replays a script and records its requests."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ramify.client import ClientSampling, Completion
from ramify.client.generate_api import RequestImage
from ramify.client.stall_clock import StallClock
from ramify.gateway import ModelRequest, RolloutLimits, RolloutSession, SamplingConfig, TokenPolicy
from ramify.trace import Message, Trace, Usage, VersionRun
from tests.gateway.fake_engine import TINY


class FakeTokenClient:
    """Samples the next text of `script`, or raises the next exception.

    `seen` has the prompt, sample and logprobs of each call, `asked` its sampling parameters, `images` its images;
    `gate` holds back replies.
    """

    def __init__(self, script: Sequence[str | Exception] | Callable[[str], str], renderer=TINY) -> None:
        self.script = script if callable(script) else list(script)
        self.renderer = renderer
        self.seen: list[tuple[list[int], list[int], list[float]]] = []
        self.asked: list[ClientSampling] = []
        self.images: list[list[tuple[str, int, int]]] = []
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
        images: Sequence[RequestImage] = (),
    ) -> Completion:
        self.images.append([(image.hash, image.start, image.stop) for image in images])
        self.asked.append(sampling)
        await self.gate.wait()
        tokenizer = self.renderer.tokenizer
        text = self.script(tokenizer.decode(prompt)) if callable(self.script) else self.script.pop(0)
        if isinstance(text, Exception):
            raise text
        full_ids = [*tokenizer.encode(text, continues_text=True).ids.tolist(), self.renderer.stop_ids[0]]
        ids = full_ids[: sampling.max_tokens]
        logprobs = [-0.125 * (1 + (7 * index + len(prompt)) % 13) for index in range(len(ids))]
        self.seen.append((list(prompt), ids, logprobs))
        half = len(ids) // 2
        runs = [VersionRun("tiny", 0, 1, half), VersionRun("tiny", 0, 2, len(ids) - half)]
        return Completion(
            np.array(ids, np.int32),
            np.array(logprobs, np.float32),
            tuple(run for run in runs if run.count),
            "stop" if len(ids) == len(full_ids) else "length",
            Usage(len(prompt), len(ids)),
            "here",
        )


def make_session(
    script, *, renderer=TINY, limits: dict[str, int] | None = None, **options: Any
) -> tuple[RolloutSession, FakeTokenClient]:
    token_client = FakeTokenClient(script, renderer)
    sampling = options.pop("sampling", SamplingConfig())
    policy = TokenPolicy(token_client, renderer, "tiny", max_model_len=options.pop("max_model_len", None))
    session = RolloutSession(
        Trace(id="t1"), policy, sampling=sampling, limits=RolloutLimits(**(limits or {})), **options
    )
    return session, token_client


def user_request(text: str, **fields: Any) -> ModelRequest:
    return ModelRequest((Message("user", text),), **fields)
