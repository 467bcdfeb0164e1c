"""A native server in a thread of the test process, with a renderer that spells one byte per token."""

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
    """Token n is the character n + 28; ids below 4 are special. A message is its text between two of them."""

    stop_ids = frozenset([2])
    longest_token = 1

    def encode(self, text: str) -> list[int]:
        return [ord(character) - 28 for character in text if 4 <= ord(character) - 28 < 96]

    def spell(self, token: int) -> str:
        return chr(token + 28) if token >= 4 else f"<{token}>"

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token + 28) for token in ids if token >= 4)

    def render(self, messages, tools) -> ChatPrompt:
        text = [[1, *self.encode(str(message["content"])), 2] for message in messages]
        return ChatPrompt([token for part in text for token in part] + ([3] if tools else []) + [1])

    def parse(self, ids: Sequence[int], prompt: ChatPrompt) -> dict[str, object]:
        return {"content": self.decode(ids)}


@contextlib.contextmanager
def served(core: EngineCore, name: str = "llama", renderer: ByteRenderer | None = None) -> Iterator[tuple[str, Engine]]:
    """The address of a running server, and the engine behind it."""
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
