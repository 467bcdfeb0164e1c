"""A large reply is parsed beside the event loop, so that everything else in the process goes on."""

import asyncio

from ramify.client import Sampling
from ramify.gateway import TokenPolicy
from ramify.trace import Message
from tests.gateway.engine import TINY
from tests.gateway.sampler import Sampler


class Heart:
    """A coroutine that counts how often the loop lets it run."""

    def __init__(self) -> None:
        self.beats = 0

    async def beat(self) -> None:
        while True:
            self.beats += 1
            await asyncio.sleep(0)


class BeatingSampler(Sampler):
    """Remembers the beats at the moment when the sample is there and nothing but parsing is left."""

    def __init__(self, text: str, heart: Heart) -> None:
        super().__init__([text])
        self.heart, self.beats = heart, 0

    async def generate(self, *args, **kwargs):
        completion = await super().generate(*args, **kwargs)
        self.beats = self.heart.beats
        return completion


async def beats_while_parsing(text: str, stop: list[str]) -> int:
    heart = Heart()
    sampler = BeatingSampler(text, heart)
    policy = TokenPolicy(sampler, TINY, "tiny")
    beating = asyncio.create_task(heart.beat())
    try:
        prepared = policy.prepare(None, [Message("user", "hi")])
        sampled = await policy.sample(prepared, Sampling(max_tokens=1_000_000), session="s", deadline=60.0, stop=stop)
        assert sampled.message.content == text
        return heart.beats - sampler.beats
    finally:
        beating.cancel()


def test_the_loop_goes_on_while_a_large_reply_is_parsed():
    text = "<tool_call>{" * 5_000
    assert asyncio.run(beats_while_parsing(text, [])) > 10
    assert asyncio.run(beats_while_parsing(text, ["never there"])) > 10


def test_a_small_reply_is_parsed_at_once():
    assert asyncio.run(beats_while_parsing("hello", [])) == 0
