"""A native server in a thread of the test process, with a renderer of one character per token."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ramify.infer.config import ServerConfig
from ramify.infer.engine import Engine
from ramify.infer.engine_core import EngineCore
from ramify.infer.server import build_app, build_http_server
from ramify.model.render import ParsedReply, RenderedPrompt, Renderer
from ramify.model.render.outline import ConversationOutline
from ramify.model.render.tokenizer import EncodedText
from ramify.trace import Message


class ByteTokenizer:
    """Token n is the character n + 28; ids below 4 are special."""

    max_token_chars = 1

    def encode(self, text: str) -> EncodedText:
        ids = [ord(character) - 28 for character in text if 4 <= ord(character) - 28 < 96]
        starts = np.arange(len(ids), dtype=np.int32)
        return EncodedText(np.array(ids, np.int32), starts, starts + 1)

    def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool = True) -> str:
        texts = [chr(token + 28) if token >= 4 else f"<{token}>" * keep_special_tokens for token in token_ids]
        return "".join(texts)


class ByteRenderer(Renderer):
    """A message is its text between tokens 1 and 2."""

    tokenizer: Any = ByteTokenizer()
    stop_ids = (2,)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids.tolist()

    def _render_uncached(self, messages, tools, media=(), *, add_generation_prompt=True) -> RenderedPrompt:
        parts = [[1, *self.encode(message.text), 2] for message in messages]
        ids = [token for part in parts for token in part] + ([3] if tools else []) + [1]
        return RenderedPrompt(tuple(messages), tuple(tools), np.array(ids, np.int32), (), ConversationOutline())

    def _render_continuation(self, history, messages):
        raise NotImplementedError("the server renders whole conversations")

    def parse(self, sampled_ids: Any, prompt: RenderedPrompt) -> ParsedReply:
        text = self.tokenizer.decode(sampled_ids, keep_special_tokens=False)
        return ParsedReply(Message("assistant", text), (0, len(sampled_ids)))


@contextlib.contextmanager
def run_server(
    core: EngineCore, name: str = "llama", renderer: Renderer | None = None, port: int = 0
) -> Iterator[tuple[str, Engine]]:
    """Run a server; yields its address and its engine."""
    engine = Engine(core).start()
    ready, address, stop = threading.Event(), [], asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        app = build_app(engine, name=name, renderer=renderer or ByteRenderer(), timeout=60.0)
        async with build_http_server(
            app, ServerConfig(port=port, shutdown_timeout=2, allowed_hosts=["engine.lab.example"])
        ) as server:
            address.append(server.address)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), name="test-server")
    thread.start()
    try:
        assert ready.wait(30), "the server did not start"
        yield address[0], engine
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
        engine.close()
        assert not thread.is_alive()
