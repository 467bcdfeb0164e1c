"""A large reply is parsed in a thread, so that the event loop keeps running."""

import asyncio
import threading
from typing import Any

from ramify.client import ClientSampling
from ramify.gateway import TokenPolicy
from ramify.gateway.policy import PolicyRequest
from ramify.render import ParsedReply
from ramify.trace import Message
from tests.gateway.fake_client import FakeTokenClient
from tests.gateway.fake_engine import TINY

MIN_ITERATIONS = 20


class LoopCounter:
    """Counts the iterations of the event loop since `reset`."""

    def __init__(self) -> None:
        self.iterations = 0
        self.has_run = threading.Event()

    async def run(self) -> None:
        while True:
            self.iterations += 1
            if self.iterations >= MIN_ITERATIONS:
                self.has_run.set()
            await asyncio.sleep(0)

    def reset(self) -> None:
        self.iterations = 0
        self.has_run.clear()


class SlowRenderer:
    """The renderer of tiny, which waits for iterations of the event loop before it parses."""

    def __init__(self, counter: LoopCounter) -> None:
        self.counter, self.waits = counter, True

    def __getattr__(self, name: str) -> Any:
        return getattr(TINY, name)

    def parse(self, *args: Any) -> ParsedReply:
        self.counter.reset()
        if self.waits:
            self.counter.has_run.wait(20)
        self.iterations = self.counter.iterations
        return TINY.parse(*args)


async def count_loop_iterations_during_parsing(text: str, stop: list[str], *, waits: bool = True) -> int:
    counter = LoopCounter()
    renderer = SlowRenderer(counter)
    renderer.waits = waits
    policy = TokenPolicy(FakeTokenClient([text]), renderer, "tiny")
    counting = asyncio.create_task(counter.run())
    try:
        prepared = policy.prepare(None, [Message("user", "hi")])
        sampled = await policy.sample(PolicyRequest(prepared, ClientSampling(max_tokens=100_000), "s", 60.0, stop))
        assert sampled.message.content == text
        return renderer.iterations
    finally:
        counting.cancel()


def test_the_event_loop_runs_while_a_large_reply_is_parsed():
    text = "<tool_call>{" * 1000
    assert asyncio.run(count_loop_iterations_during_parsing(text, [])) >= MIN_ITERATIONS
    assert asyncio.run(count_loop_iterations_during_parsing(text, ["never there"])) >= MIN_ITERATIONS


def test_a_small_reply_is_parsed_in_the_event_loop():
    assert asyncio.run(count_loop_iterations_during_parsing("hello", [], waits=False)) == 0
