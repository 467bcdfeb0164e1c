"""A fake inference server over real sockets that responds, refuses, hangs or disconnects on request.

It implements just enough of the API for the client to join it, and records its requests.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

from ramify.images import ProcessedImage
from ramify.trace.version import PolicyVersion

LOGITS = [0.3 * ((7 * token) % 11) for token in range(12)]


class Fake:
    """One server. `behaviour` handles generate requests and may be changed at any time.

    `asked` has the bodies of generate requests, `paths` the targets of all, `images` the uploaded images; `hung_up` is
    set when a client disconnects before its response.
    """

    def __init__(self, version: PolicyVersion = PolicyVersion("fake", 0, 1)) -> None:  # noqa: B008
        self.version = version
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.images: dict[str, ProcessedImage] = {}
        self.behaviour: Callable[[Fake, Exchange], Awaitable[None]] = answer
        self.healthy = True
        self.hung_up = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "Fake":
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        while self._connections:  # until the sockets are closed, a client would take the server for alive
            await asyncio.sleep(0.001)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                    path = head.split()[1]
                    length = next(
                        (int(line[15:]) for line in head.lower().splitlines() if "content-length:" in line), 0
                    )
                    data = await reader.readexactly(length)
                    if path.startswith("/inference/v1/images/"):
                        await self._store_image(path, data, Exchange(reader, writer, {}))
                    else:
                        await self._route(path, Exchange(reader, writer, json.loads(data or b"{}")))
                    if writer.is_closing():
                        return
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _store_image(self, path: str, data: bytes, exchange: "Exchange") -> None:
        self.paths.append(path)
        image = ProcessedImage.decode(data)
        assert path.endswith(image.hash)
        self.images[image.hash] = image
        await exchange.reply({})

    async def _route(self, target: str, exchange: "Exchange") -> None:
        path = target.partition("?")[0]
        self.paths.append(target)
        if path == "/health":
            await exchange.reply({"status": "ok" if self.healthy else "failed"}, 200 if self.healthy else 503)
        elif path == "/v1/models":
            await exchange.reply({"data": [self.card()]})
        elif path == "/inference/v1/generate":
            missing = {image["hash"] for image in exchange.body.get("images", ())} - set(self.images)
            if missing:
                error = {"message": "upload them first", "type": "ImageMissing", "hashes": sorted(missing)}
                await exchange.reply({"error": error}, 409)
                return
            self.asked.append(exchange.body)
            await self.behaviour(self, exchange)
        else:
            await self.control(path, exchange)

    def card(self) -> dict[str, Any]:
        return {"id": "fake", "owned_by": "ramify", "max_model_len": 64, "version": self.version._asdict()}

    async def control(self, path: str, exchange: "Exchange") -> None:
        if path == "/update_weights":
            self.version = PolicyVersion("fake", 0, int(exchange.body["path"].rpartition("-")[2]))
            await exchange.reply({"version": self.version._asdict(), "seconds": 0.0})
        else:
            await exchange.reply({"status": "ok"})

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a response with `max_tokens` tokens, all of them 7."""
        count = body["sampling_params"]["max_tokens"]
        entries = [{"token": "token_id:7", "logprob": -0.5, "top_logprobs": []}] * count
        choice = {"token_ids": [7] * count, "finish_reason": "length", "logprobs": {"content": entries}}
        return {"choices": [{**choice, "policy_versions": [[*self.version, count]]}]}


class FakeVLLM(Fake):
    """Imitates vLLM: versions are labels, logprobs are before or after temperature, cache resets may fail."""

    def __init__(self, *, processed: bool = True, root: str | None = None) -> None:
        super().__init__()
        self.processed, self.root = processed, root
        self.label = "default"
        self.refused_resets = 0

    def card(self) -> dict[str, Any]:
        return {"id": "fake", "owned_by": "vllm", "max_model_len": 64, "root": self.root}

    async def control(self, path: str, exchange: "Exchange") -> None:
        reply: dict[str, Any] = {"status": "ok"}
        if path == "/weight_info":
            reply = {"weight_version": self.label}
        elif path == "/update_weight_version":
            self.label = exchange.body["new_version"]
        elif path == "/reset_prefix_cache":
            self.refused_resets -= 1
            reply = {"success": self.refused_resets < 0}
        await exchange.reply(reply)

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        knobs = body["sampling_params"]
        count = knobs["max_tokens"]
        logits = [logit / knobs["temperature"] if self.processed else logit for logit in LOGITS]
        normaliser = math.log(sum(map(math.exp, logits)))
        top = [{"token_id": token, "logprob": logit - normaliser} for token, logit in enumerate(logits)]
        entries = [{"token_id": 7, "logprob": top[7]["logprob"], "top_logprobs": top[: knobs["logprobs"]]}] * count
        spans = [{"version": self.label, "start": 0, "end": count}]
        choice = {"token_ids": [7] * count, "finish_reason": "length", "logprobs": {"content": entries}}
        return {"choices": [{**choice, "weight_versions": spans}]}


class Exchange:
    """A request that waits for its response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.reader, self.writer, self.body = reader, writer, body

    async def reply(self, body: dict[str, Any], status: int = 200, headers: str = "") -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
        self.writer.write(head.encode() + data)
        await self.writer.drain()


# -- behaviours -------------------------------------------------------------------------------------------------------


async def answer(fake: Fake, exchange: Exchange) -> None:
    await exchange.reply(fake.sample(exchange.body))


async def hang(fake: Fake, exchange: Exchange) -> None:
    """Never respond, and record when the client disconnects."""
    if not await exchange.reader.read(1):
        fake.hung_up.set()
    exchange.writer.close()


async def reset(fake: Fake, exchange: Exchange) -> None:
    """Disconnect instead of responding."""
    exchange.writer.transport.abort()


async def full(fake: Fake, exchange: Exchange) -> None:
    error = {"message": "8 requests wait already, the limit is 8", "type": "QueueFull"}
    await exchange.reply({"error": error}, 503, "Retry-After: 0\r\n")


async def broken(fake: Fake, exchange: Exchange) -> None:
    await exchange.reply({"detail": "CUDA error: out of cheese"}, 500)


def first(behaviour: Callable[[Fake, Exchange], Awaitable[None]], times: int = 1):
    """Return a behaviour that is `behaviour` the first few times and then responds normally."""

    async def act(fake: Fake, exchange: Exchange) -> None:
        await (behaviour if len(fake.asked) <= times else answer)(fake, exchange)

    return act
