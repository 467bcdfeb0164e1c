"""Large prompts are rendered and large replies parsed in a thread, so that the event loop keeps running."""

import asyncio
import threading
from typing import Any

import pytest

from ramify.infer.client import ClientSampling
from ramify.infer.gateway import TokenPolicy
from ramify.infer.gateway.policy import PolicyRequest
from ramify.model.render import ParsedReply, RenderedPrompt
from ramify.trace import Message
from tests.support.engine import TINY, ScriptedClient
from tests.support.scenario import make_session, user_request

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
        self.counter, self.waits, self.iterations = counter, False, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TINY, name)

    def parse_after_prefill(self, *args: Any) -> ParsedReply:
        self._wait_for_loop()
        return TINY.parse_after_prefill(*args)

    def render(self, *args: Any, **options: Any) -> RenderedPrompt:
        self._wait_for_loop()
        return TINY.render(*args, **options)

    def _wait_for_loop(self) -> None:
        self.counter.reset()
        if self.waits:
            self.counter.has_run.wait(20)
        self.iterations = self.counter.iterations


async def count_loop_iterations_during_parsing(text: str, stop: list[str], *, waits: bool = True) -> int:
    counter = LoopCounter()
    renderer: Any = SlowRenderer(counter)
    policy = TokenPolicy(ScriptedClient([text]), renderer, "tiny")
    counting = asyncio.create_task(counter.run())
    try:
        prepared = policy.prepare(None, [Message("user", "hi")], (), {}, "")
        renderer.waits = waits
        sampled = await policy.sample(PolicyRequest(prepared, ClientSampling(max_tokens=100_000), "s", 60.0, stop))
        assert sampled.message.content == text
        return renderer.iterations
    finally:
        counting.cancel()


async def test_the_event_loop_runs_while_a_large_reply_is_parsed():
    text = "<tool_call>{" * 1000
    assert await count_loop_iterations_during_parsing(text, []) >= MIN_ITERATIONS
    assert await count_loop_iterations_during_parsing(text, ["never there"]) >= MIN_ITERATIONS


async def test_a_small_reply_is_parsed_in_the_event_loop():
    assert await count_loop_iterations_during_parsing("hello", [], waits=False) == 0


async def count_loop_iterations_during_rendering(text: str, *, is_remote: bool, waits: bool = True) -> int:
    counter = LoopCounter()
    renderer: Any = SlowRenderer(counter)
    session, _ = make_session([], renderer=renderer)
    assert session.policy.adapt([Message("user", "hi")], {}, starts_conversation=True)  # renders once, and remembers
    renderer.waits = waits
    counting = asyncio.create_task(counter.run())
    try:
        await session.count_prompt_tokens(user_request(text, is_remote=is_remote))
        return renderer.iterations
    finally:
        counting.cancel()


@pytest.mark.parametrize("is_remote", [True, False])
async def test_the_event_loop_runs_while_a_large_prompt_is_rendered(is_remote):
    assert await count_loop_iterations_during_rendering("word " * 5000, is_remote=is_remote) >= MIN_ITERATIONS
    assert await count_loop_iterations_during_rendering("hi", is_remote=is_remote, waits=False) == 0
