"""A large reply is parsed beside the event loop, so that everything else in the process goes on."""

import asyncio
import threading
from typing import Any

from ramify.client import ClientSampling
from ramify.gateway import TokenPolicy
from ramify.render import ParsedReply
from ramify.trace import Message
from tests.gateway.engine import TINY
from tests.gateway.sampler import Sampler

BEATS = 20


class Heart:
    """A coroutine that counts how often the loop lets it run since it was asked to."""

    def __init__(self) -> None:
        self.beats = 0
        self.has_beaten = threading.Event()

    async def beat(self) -> None:
        while True:
            self.beats += 1
            if self.beats >= BEATS:
                self.has_beaten.set()
            await asyncio.sleep(0)

    def start_again(self) -> None:
        self.beats = 0
        self.has_beaten.clear()


class PatientRenderer:
    """The renderer of tiny, which parses a reply when the heart has beaten; it waits two seconds for that."""

    def __init__(self, heart: Heart) -> None:
        self.heart, self.waits = heart, True

    def __getattr__(self, name: str) -> Any:
        return getattr(TINY, name)

    def parse(self, *args: Any) -> ParsedReply:
        self.heart.start_again()
        if self.waits:
            self.heart.has_beaten.wait(2)
        self.beats = self.heart.beats
        return TINY.parse(*args)


async def beats_before_parsing(text: str, stop: list[str], *, waits: bool = True) -> int:
    heart = Heart()
    renderer = PatientRenderer(heart)
    renderer.waits = waits
    policy = TokenPolicy(Sampler([text]), renderer, "tiny")
    beating = asyncio.create_task(heart.beat())
    try:
        prepared = policy.prepare(None, [Message("user", "hi")])
        sampled = await policy.sample(
            prepared, ClientSampling(max_tokens=100_000), session="s", timeout=60.0, stop_strings=stop
        )
        assert sampled.message.content == text
        return renderer.beats
    finally:
        beating.cancel()


def test_the_loop_goes_on_while_a_large_reply_is_parsed():
    text = "<tool_call>{" * 1000
    assert asyncio.run(beats_before_parsing(text, [])) >= BEATS
    assert asyncio.run(beats_before_parsing(text, ["never there"])) >= BEATS


def test_a_small_reply_is_parsed_at_once():
    assert asyncio.run(beats_before_parsing("hello", [], waits=False)) == 0
