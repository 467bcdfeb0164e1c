"""A fake engine over real sockets: it replays a script and records all tokens of prompts and samples."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from ramify.model.resolve import resolve_model_path
from ramify.render import load_renderer
from ramify.trace import Trace
from tests.client.fake import Exchange, Fake

TINY = load_renderer(resolve_model_path("tiny"))


class FakeEngine(Fake):
    """Samples the next text of `script`, or what it returns for the prompt's text, and then the stop token."""

    def __init__(self, script: list[str] | Callable[[str], str], renderer=TINY) -> None:
        super().__init__()
        self.behaviour = _respond_when_open
        self.reset(script, renderer)

    def reset(self, script: list[str] | Callable[[str], str], renderer=TINY) -> None:
        """Clear the records and replay another script."""
        self.script, self.renderer = script, renderer
        self.seen: list[tuple[list[int], list[int], list[float]]] = []  # prompt, sample, logprobs
        self.asked, self.paths, self.images = [], [], {}
        self.gate = asyncio.Event()  # samples wait until it is set
        self.gate.set()
        self.hung_up = asyncio.Event()

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, tokenizer = body["token_ids"], self.renderer.tokenizer
        text = self.script(tokenizer.decode(prompt)) if callable(self.script) else self.script.pop(0)
        max_tokens = body["sampling_params"]["max_tokens"]
        full_ids = [*tokenizer.encode(text, continues_text=True).ids.tolist(), self.renderer.stop_ids[0]]
        ids = full_ids[:max_tokens]
        logprobs = [-0.125 * (1 + (7 * index + len(prompt)) % 13) for index in range(len(ids))]
        self.seen.append((prompt, ids, logprobs))
        entries = [{"logprob": logprob} for logprob in logprobs]
        finish_reason = "stop" if len(ids) == len(full_ids) else "length"
        choice = {"token_ids": ids, "finish_reason": finish_reason, "logprobs": {"content": entries}}
        return {"choices": [{**choice, "policy_versions": [[*self.version, len(ids)]]}]}


async def _respond_when_open(engine: Fake, exchange: Exchange) -> None:
    """Respond when the gate opens, unless the client disconnects first."""
    assert isinstance(engine, FakeEngine)
    gate, disconnected = asyncio.ensure_future(engine.gate.wait()), asyncio.ensure_future(exchange.reader.read(1))
    await asyncio.wait({gate, disconnected}, return_when=asyncio.FIRST_COMPLETED)
    if not gate.done():
        gate.cancel()
        engine.hung_up.set()
        exchange.writer.close()
        return
    disconnected.cancel()
    await asyncio.wait({disconnected})
    await exchange.reply(engine.sample(exchange.body))


class CallRecord(Protocol):
    """A stand-in that records the prompt, sample and logprobs of each call."""

    seen: list[tuple[list[int], list[int], list[float]]]


def check_tokens(trace: Trace, engine: CallRecord) -> None:
    """Check that the paths of the trace are exactly the prompts and samples of the engine, with their logprobs."""
    calls = [node for node in trace.nodes if node.call is not None]
    paths = [path_and_logprobs(trace, node.index) for node in calls]
    seen = [(prompt + ids, logprobs) for prompt, ids, logprobs in engine.seen]
    assert sorted(paths) == sorted(seen)


def path_and_logprobs(trace: Trace, node: int) -> tuple[list[int], list[float]]:
    return trace.graph.path_tokens(node).tolist(), trace.nodes[node].logprobs.tolist()
