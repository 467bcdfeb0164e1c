"""A token engine that says what it is told to, over real sockets, and remembers every token it saw and gave."""

import asyncio
from collections.abc import Callable
from typing import Any

from ramify.model.resolve import resolve_model_path
from ramify.render import load_renderer
from ramify.trace import Trace
from tests.client.fake import Exchange, Fake

TINY = load_renderer(resolve_model_path("tiny"))


class Engine(Fake):
    """Answers with the next text of `script`, or with what it gives for the prompt's text, then the stop token."""

    def __init__(self, script: list[str] | Callable[[str], str], renderer=TINY) -> None:
        super().__init__()
        self.behaviour = _when_open
        self.reset(script, renderer)

    def reset(self, script: list[str] | Callable[[str], str], renderer=TINY) -> None:
        """Forget what was seen, and play another script."""
        self.script, self.renderer = script, renderer
        self.seen: list[tuple[list[int], list[int], list[float]]] = []  # prompt, sample, logprobs
        self.asked = []
        self.gate = asyncio.Event()  # no sample is given while it is not set
        self.gate.set()
        self.hung_up = asyncio.Event()

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, tokenizer = body["token_ids"], self.renderer.tokenizer
        text = self.script(tokenizer.decode(prompt)) if callable(self.script) else self.script.pop(0)
        most = body["sampling_params"]["max_tokens"]
        whole = [*tokenizer.encode(text, continues_text=True).ids.tolist(), self.renderer.stop_ids[0]]
        ids = whole[:most]
        logprobs = [-0.125 * (1 + (7 * at + len(prompt)) % 13) for at in range(len(ids))]
        self.seen.append((prompt, ids, logprobs))
        entries = [{"logprob": logprob} for logprob in logprobs]
        finish = "stop" if len(ids) == len(whole) else "length"
        choice = {"token_ids": ids, "finish_reason": finish, "logprobs": {"content": entries}}
        return {"choices": [{**choice, "policy_versions": [[*self.version, len(ids)]]}]}


async def _when_open(engine: Engine, exchange: Exchange) -> None:
    """Answer when the gate opens, unless the client hangs up first."""
    gate, gone = asyncio.ensure_future(engine.gate.wait()), asyncio.ensure_future(exchange.reader.read(1))
    await asyncio.wait({gate, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not gate.done():
        gate.cancel()
        engine.hung_up.set()
        exchange.writer.close()
        return
    gone.cancel()
    await asyncio.wait({gone})
    await exchange.reply(engine.sample(exchange.body))


def check_tokens(trace: Trace, engine: Engine) -> None:
    """Every sample is a path of the trace, token by token what the engine saw and gave, and there are no others."""
    calls = [node for node in trace.nodes if node.call is not None]
    paths = [branch_of(trace, node.index) for node in calls]
    seen = [(prompt + ids, logprobs) for prompt, ids, logprobs in engine.seen]
    assert sorted(paths) == sorted(seen)


def branch_of(trace: Trace, node: int) -> tuple[list[int], list[float]]:
    return trace.graph.path_tokens(node).tolist(), trace.nodes[node].logprobs.tolist()
