"""The scripted inference engine and model client of the tests.

`ScriptedEngine` implements the API of inference servers and of chat endpoints over real sockets; `ScriptedClient` is a
client without a network. Both replay a script as tokens of the model `tiny` and record their requests.
"""

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ramify.infer.client import ClientSampling, Completion
from ramify.infer.client.generate_messages import RequestImage
from ramify.infer.client.stall_clock import StallClock
from ramify.model.images import ProcessedImage
from ramify.model.render import load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.trace import Trace, Usage, VersionSpan
from ramify.trace.version import PolicyVersion

TINY = load_renderer(resolve_model_path("tiny"))
CHAT_USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
VLLM_LOGITS = [0.3 * ((7 * token) % 11) for token in range(12)]

Reply = str | dict[str, Any] | tuple[int, Any] | Exception
"""A text, a chat message, a status with the body of an error, or (of a client) an exception that is raised."""

Script = Sequence[Reply] | Callable[[str], Reply]
"""The replies in order, or a function that returns the reply to the text of a prompt or of the last chat message."""


class Sample(NamedTuple):
    """One call of a model: its prompt, the sampled tokens and their logprobs."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


class ScriptedModel:
    """Replays a script; `samples` has the token calls in order."""

    def __init__(self, script: Script, renderer=TINY) -> None:
        self.set_script(script, renderer)

    def set_script(self, script: Script, renderer=TINY) -> None:
        """Replay another script from its start, and clear the samples."""
        self.script = script if callable(script) else list(script)
        self.renderer = renderer
        self.samples: list[Sample] = []

    def next_reply(self, text: str) -> Reply:
        return self.script(text) if callable(self.script) else self.script.pop(0)

    def encode_reply(self, prompt: Sequence[int], text: str, max_tokens: int) -> tuple[Sample, str]:
        """Record the reply as a sample that ends with the stop token; return it and its finish reason."""
        all_ids = [*self.renderer.tokenizer.encode(text, continues_text=True).ids.tolist(), self.renderer.stop_ids[0]]
        ids = all_ids[:max_tokens]
        logprobs = [-0.125 * (1 + (7 * index + len(prompt)) % 13) for index in range(len(ids))]
        sample = Sample(list(prompt), ids, logprobs)
        self.samples.append(sample)
        return sample, "stop" if len(ids) == len(all_ids) else "length"


class ScriptedClient(ScriptedModel):
    """A token client without a network. Each reply has two policy versions.

    `requests` has the sampling parameters of each call, `images` its images; replies wait while `gate` is cleared.
    """

    def __init__(self, script: Script, renderer=TINY) -> None:
        super().__init__(script, renderer)
        self.requests: list[ClientSampling] = []
        self.images: list[list[tuple[str, int, int]]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: ClientSampling,
        *,
        session: str | None = None,
        timeout: float = 600.0,
        clock: StallClock | None = None,
        images: Sequence[RequestImage] = (),
    ) -> Completion:
        self.images.append([(image.hash, image.start, image.stop) for image in images])
        self.requests.append(sampling)
        await self.gate.wait()
        reply = self.next_reply(self.renderer.tokenizer.decode(prompt))
        if isinstance(reply, Exception):
            raise reply
        sample, finish_reason = self.encode_reply(prompt, reply, sampling.max_tokens)
        count = len(sample.token_ids)
        runs = [VersionSpan("tiny", 0, 1, count // 2), VersionSpan("tiny", 0, 2, count - count // 2)]
        return Completion(
            np.array(sample.token_ids, np.int32),
            np.array(sample.logprobs, np.float32),
            tuple(run for run in runs if run.count),
            finish_reason,
            Usage(len(prompt), count),
            "here",
        )


class Exchange:
    """A request that waits for its response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str, data: bytes) -> None:
        self.reader, self.writer, self.data = reader, writer, data
        self.target = head.split()[1]
        lines = (line.partition(":") for line in head.splitlines()[1:])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in lines}

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.data or b"{}")

    async def reply(self, body: dict[str, Any] | str, status: int = 200, headers: str = "") -> None:
        """Send JSON, or a text as plain text."""
        data, kind = (body, "text/plain") if isinstance(body, str) else (json.dumps(body), "application/json")
        size = len(data.encode())
        head = f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n{headers}\r\n"
        self.writer.write((head + data).encode())
        await self.writer.drain()


Behaviour = Callable[["ScriptedEngine", Exchange], Awaitable[None]]


class ScriptedEngine(ScriptedModel):
    """An inference server that replays a script; without a script, every sampled token is 7.

    Without an owner it is a chat endpoint that lists no models.

    `behaviour` handles generate requests and may be changed at any time. Responses are sent after `delay` seconds, and
    wait while `gate` is cleared. `requests` has the bodies of generate and chat requests, `targets` the targets of all
    requests, `images` the uploaded images, `api_keys` the authorizations of chat requests; `disconnected` is set when a
    client disconnects before its response.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        version: PolicyVersion = PolicyVersion("fake", 0, 1),  # noqa: B008
        delay: float = 0.0,
        owner: str | None = "ramify",
    ) -> None:
        self.version, self.delay, self.owner = version, delay, owner
        self.healthy = True
        self.port = 0
        self._server: asyncio.Server | None = None
        self.connections: set[asyncio.StreamWriter] = set()
        self.reset(script)

    def reset(self, script: Script | None = None, renderer=TINY) -> None:
        """Clear the records and replay another script."""
        self.set_script(() if script is None else script, renderer)
        self.has_script = script is not None
        self.behaviour: Behaviour = respond
        self.requests: list[dict[str, Any]] = []
        self.targets: list[str] = []
        self.api_keys: list[str | None] = []
        self.images: dict[str, ProcessedImage] = {}
        self.gate, self.disconnected = asyncio.Event(), asyncio.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "ScriptedEngine":
        self._server = await asyncio.start_server(self._serve_connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self.connections):
            writer.transport.abort()
        while self.connections:  # until the sockets are closed, a client would consider the server alive
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)  # a client in this event loop reads the end of its connections

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while not writer.is_closing():
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                    exchange = Exchange(reader, writer, head, b"")
                    exchange.data = await reader.readexactly(int(exchange.headers.get("content-length", 0)))
                    self.targets.append(exchange.target)
                    await self.route(exchange)
        finally:
            self.connections.discard(writer)
            writer.close()

    async def route(self, exchange: Exchange) -> None:
        path = exchange.path
        if path == "/health":
            await exchange.reply({"status": "ok" if self.healthy else "failed"}, 200 if self.healthy else 503)
        elif path == "/v1/models" and self.owner is not None:
            await exchange.reply({"data": [self.card()]})
        elif path == "/v1/chat/completions":
            await self._complete_chat(exchange)
        elif path == "/inference/v1/generate":
            await self._generate(exchange)
        elif path.startswith("/inference/v1/images/"):
            await self.store_image(exchange)
        elif self.owner is None:
            await exchange.reply({"error": {"message": "not found"}}, 404)
        else:
            await self.control(path, exchange)

    def card(self) -> dict[str, Any]:
        return {"id": "tiny", "owned_by": self.owner, "max_model_len": 2048, "version": self.version._asdict()}

    async def store_image(self, exchange: Exchange) -> None:
        image = ProcessedImage.decode(exchange.data)
        assert exchange.path.endswith(image.hash)
        self.images[image.hash] = image
        await exchange.reply({})

    async def control(self, path: str, exchange: Exchange) -> None:
        """Handle a request that neither samples nor describes the server."""
        if path == "/update_weights":
            step = int(exchange.body["path"].rpartition("-")[2])
            self.version = self.version._replace(incarnation=0, step=step)
            await exchange.reply({"version": self.version._asdict(), "seconds": 0.0})
        else:
            await exchange.reply({"status": "ok"})

    async def _generate(self, exchange: Exchange) -> None:
        missing = {image["hash"] for image in exchange.body.get("images", ())} - set(self.images)
        if missing:
            error = {"message": "upload them first", "type": "ImageMissing", "hashes": sorted(missing)}
            await exchange.reply({"error": error}, 409)
            return
        self.requests.append(exchange.body)
        await self.behaviour(self, exchange)

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the response to a generate request."""
        prompt, count = body["token_ids"], body["sampling_params"]["max_tokens"]
        if self.has_script:
            reply = self.next_reply(self.renderer.tokenizer.decode(prompt))
            sample, finish_reason = self.encode_reply(prompt, reply, count)
        else:
            sample, finish_reason = Sample(prompt, [7] * count, [-0.5] * count), "length"
        entries = [{"logprob": logprob} for logprob in sample.logprobs]
        choice = {"token_ids": sample.token_ids, "finish_reason": finish_reason, "logprobs": {"content": entries}}
        return {"choices": [{**choice, "policy_versions": [[*self.version, len(sample.token_ids)]]}]}

    async def _complete_chat(self, exchange: Exchange) -> None:
        body = exchange.body
        self.requests.append(body)
        self.api_keys.append(exchange.headers.get("authorization"))
        await asyncio.sleep(self.delay)
        reply = self.next_reply(str(body["messages"][-1]["content"]))
        if isinstance(reply, tuple):
            status, error = reply
            await exchange.reply({"error": {"message": error}} if isinstance(error, str) else error, status)
            return
        message = {"role": "assistant", **(reply if isinstance(reply, dict) else {"content": reply})}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        await exchange.reply({"choices": [choice], "usage": CHAT_USAGE})


class ScriptedVLLM(ScriptedEngine):
    """Imitates vLLM: versions are labels, logprobs are before or after temperature, cache resets may fail."""

    def __init__(self, *, processed: bool = True, root: str | None = None) -> None:
        super().__init__()
        self.processed, self.root = processed, root
        self.label = "default"
        self.refused_resets = 0

    def card(self) -> dict[str, Any]:
        return {"id": "fake", "owned_by": "vllm", "max_model_len": 64, "root": self.root}

    async def control(self, path: str, exchange: Exchange) -> None:
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
        options = body["sampling_params"]
        count = options["max_tokens"]
        logits = [logit / options["temperature"] if self.processed else logit for logit in VLLM_LOGITS]
        normaliser = math.log(sum(map(math.exp, logits)))
        top = [{"token_id": token, "logprob": logit - normaliser} for token, logit in enumerate(logits)]
        entries = [{"token_id": 7, "logprob": top[7]["logprob"], "top_logprobs": top[: options["logprobs"]]}] * count
        spans = [{"version": self.label, "start": 0, "end": count}]
        choice = {"token_ids": [7] * count, "finish_reason": "length", "logprobs": {"content": entries}}
        return {"choices": [{**choice, "weight_versions": spans}]}


@contextlib.contextmanager
def run_engine(engine: ScriptedEngine) -> Iterator[ScriptedEngine]:
    """Run an engine in a thread of its own and yield it."""
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

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


# -- scripts ----------------------------------------------------------------------------------------------------------


def reply_cba(_: str) -> str:
    """Reply the reversed "abc", always."""
    return "<reversed_text>cba</reversed_text>"


def reverse_some(prompt: str) -> str:
    """Reply the reversed last user message, without the first letter if the code of the text's last letter is odd."""
    text = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return f"<reversed_text>{text[::-1][ord(text[-1]) % 2 :]}</reversed_text>"


# -- behaviours -------------------------------------------------------------------------------------------------------


async def respond(engine: ScriptedEngine, exchange: Exchange) -> None:
    """Respond after the engine's delay when its gate is open, unless the client disconnects before the gate opens."""
    if not engine.gate.is_set():
        opened, disconnected = map(asyncio.ensure_future, (engine.gate.wait(), exchange.reader.read(1)))
        await asyncio.wait({opened, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            opened.cancel()
            engine.disconnected.set()
            exchange.writer.close()
            return
        disconnected.cancel()
        await asyncio.wait({disconnected})
    await asyncio.sleep(engine.delay)
    await exchange.reply(engine.sample(exchange.body))


async def hang(engine: ScriptedEngine, exchange: Exchange) -> None:
    """Never respond, and record when the client disconnects."""
    if not await exchange.reader.read(1):
        engine.disconnected.set()
    exchange.writer.close()


async def disconnect(engine: ScriptedEngine, exchange: Exchange) -> None:
    """Disconnect instead of responding."""
    exchange.writer.transport.abort()


async def refuse_as_full(engine: ScriptedEngine, exchange: Exchange) -> None:
    error = {"message": "8 requests wait already, the limit is 8", "type": "QueueFull"}
    await exchange.reply({"error": error}, 503, "Retry-After: 0\r\n")


async def fail(engine: ScriptedEngine, exchange: Exchange) -> None:
    await exchange.reply({"detail": "CUDA error: out of cheese"}, 500)


def first(behaviour: Behaviour, times: int = 1) -> Behaviour:
    """Return a behaviour that is `behaviour` for the first few requests and then responds normally."""

    async def act(engine: ScriptedEngine, exchange: Exchange) -> None:
        await (behaviour if len(engine.requests) <= times else respond)(engine, exchange)

    return act


# -- checks -----------------------------------------------------------------------------------------------------------


def check_tokens(trace: Trace, model: ScriptedModel) -> None:
    """Check that the paths of the trace are exactly the prompts and samples of the model, with their logprobs."""
    nodes = [node for node in trace.nodes if node.call is not None]
    paths = [(trace.graph.path_tokens(node.index).tolist(), node.logprobs.tolist()) for node in nodes]
    assert sorted(paths) == sorted((sample.prompt + sample.token_ids, sample.logprobs) for sample in model.samples)
