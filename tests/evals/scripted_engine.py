"""An engine without a model: it implements the token API over real sockets, with the tokenizer of `tiny`.

Its reply is the reversed text, without the first letter if the code of the text's last letter is odd: deterministic,
and right for some texts only. It can be told to answer late or to fail.
"""

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


def reply_to(text: str) -> str:
    num_dropped = ord(text[-1]) % 2
    return f"<reversed_text>{text[::-1][num_dropped:]}</reversed_text>"


class ScriptedEngine(Fake):
    """A server of the model "tiny"."""

    def __init__(self, *, delay: float = 0.0, owner: str = "ramify") -> None:
        super().__init__()
        self.delay, self.owner = delay, owner
        self.fail_next = 0  # number of next requests that are answered with an error

    def card(self) -> dict[str, Any]:
        return {"id": "tiny", "owned_by": self.owner, "max_model_len": 2048, "version": self.version._asdict()}

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = tokenizer().decode(body["token_ids"])
        ids = [
            *map(int, tokenizer().encode(reply_to(_last_user_text(prompt))).ids),
            tokenizer().token_to_id("<|im_end|>"),
        ]
        entries = [{"token": f"token_id:{token}", "logprob": -0.5, "top_logprobs": []} for token in ids]
        choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": entries}}
        return {"choices": [{**choice, "policy_versions": [[*self.version, len(ids)]]}]}

    async def control(self, path: str, exchange: Exchange) -> None:
        if path != "/v1/chat/completions":
            return await super().control(path, exchange)
        self.asked.append(exchange.body)
        await asyncio.sleep(self.delay)
        message = {"role": "assistant", "content": reply_to(exchange.body["messages"][-1]["content"])}
        usage = {"prompt_tokens": 11, "completion_tokens": 7}
        return await exchange.reply({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})


def _last_user_text(prompt: str) -> str:
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


async def _answer(engine: Fake, exchange: Exchange) -> None:
    assert isinstance(engine, ScriptedEngine)
    if engine.fail_next:
        engine.fail_next -= 1
        return await exchange.reply({"error": {"message": "out of cheese", "type": "other"}}, 500)
    await asyncio.sleep(engine.delay)
    return await exchange.reply(engine.sample(exchange.body))


@contextlib.contextmanager
def run_scripted_engine(**options: Any) -> Iterator[ScriptedEngine]:
    """Run the engine in a thread and yield it."""
    loop, engine, stop, ready = asyncio.new_event_loop(), ScriptedEngine(**options), asyncio.Event(), threading.Event()
    engine.behaviour = _answer

    async def main() -> None:
        async with engine:
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), name="scripted engine")
    thread.start()
    try:
        assert ready.wait(30)
        yield engine
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
