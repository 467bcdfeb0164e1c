"""A native server in a thread of the test process, with a renderer of one character per token."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence

from ramify.infer.chat_renderer import ChatPrompt
from ramify.infer.config import ServerConfig
from ramify.infer.engine import Engine
from ramify.infer.engine_core import EngineCore
from ramify.infer.server import build_app, run_http_server


class ByteRenderer:
    """Token n is the character n + 28; ids below 4 are special. A message is its text between tokens 1 and 2."""

    stop_ids = frozenset([2])
    max_token_chars = 1

    def encode(self, text: str) -> list[int]:
        return [ord(character) - 28 for character in text if 4 <= ord(character) - 28 < 96]

    def decode_token(self, token_id: int) -> str:
        return chr(token_id + 28) if token_id >= 4 else f"<{token_id}>"

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token + 28) for token in token_ids if token >= 4)

    def render(self, messages, tools) -> ChatPrompt:
        parts = [[1, *self.encode(str(message["content"])), 2] for message in messages]
        return ChatPrompt([token for part in parts for token in part] + ([3] if tools else []) + [1])

    def parse(self, token_ids: Sequence[int], prompt: ChatPrompt) -> dict[str, object]:
        return {"content": self.decode(token_ids)}


@contextlib.contextmanager
def run_server(
    core: EngineCore, name: str = "llama", renderer: ByteRenderer | None = None
) -> Iterator[tuple[str, Engine]]:
    """Run a server; yields its address and its engine."""
    engine = Engine(core).start()
    ready, address, stop = threading.Event(), [], asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        app = build_app(engine, name=name, renderer=renderer or ByteRenderer(), timeout=60.0)
        async with run_http_server(
            app, ServerConfig(port=0, shutdown=2, allowed_hosts=["engine.lab.example"])
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
