"""An engine without a model that answers at once, over real sockets, with tokens of `tiny`."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

from ramify.model.resolve import resolve_model_path
from ramify.render import load_renderer
from tests.client.fake import Exchange, Fake


@cache
def tokenizer():
    return load_renderer(resolve_model_path("tiny")).tokenizer


@cache
def reply() -> list[int]:
    return [
        *map(int, tokenizer().encode("<reversed_text>cba</reversed_text>").ids),
        tokenizer().token_to_id("<|im_end|>"),
    ]


class Instant(Fake):
    """A server of `tiny` that always gives the same reply."""

    def __init__(self, late: float = 0.0) -> None:
        super().__init__()
        self.late = late
        self.behaviour = _answer

    def card(self) -> dict[str, Any]:
        return {"id": "tiny", "owned_by": "ramify", "max_model_len": 2048, "version": self.version._asdict()}

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        entries = [{"token": f"token_id:{token}", "logprob": -0.5, "top_logprobs": []} for token in reply()]
        choice = {"token_ids": reply(), "finish_reason": "stop", "logprobs": {"content": entries}}
        return {"choices": [{**choice, "policy_versions": [[*self.version, len(reply())]]}]}


async def _answer(engine: Fake, exchange: Exchange) -> None:
    assert isinstance(engine, Instant)
    await asyncio.sleep(engine.late)
    await exchange.reply(engine.sample(exchange.body))


@contextlib.contextmanager
def instant(late: float = 0.0) -> Iterator[Instant]:
    """Run the engine in its own thread and yield it."""
    loop, engine, stop, ready = asyncio.new_event_loop(), Instant(late), asyncio.Event(), threading.Event()

    async def main() -> None:
        async with engine:
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), name="instant engine")
    thread.start()
    try:
        assert ready.wait(30)
        yield engine
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
