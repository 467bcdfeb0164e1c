"""A teacher that cannot be used is refused before the first rollout, with its name and the reason."""

import json
from contextlib import AsyncExitStack

import pytest

from ramify.core.errors import EngineIncompatible, ProviderError
from ramify.infer.config import NamedModelConfig
from ramify.model.render.tokenizer import Tokenizer
from ramify.model.resolve import resolve_model_path
from ramify.orchestrate.connections import connect_model
from tests.support.engine import ScriptedEngine

TINY = resolve_model_path("tiny")


async def connect(url: str, *, must_score: bool = True, timeout: float = 5.0) -> None:
    async with AsyncExitStack() as stack:
        config = NamedModelConfig(base_url=[url])
        await connect_model("teacher", config, TINY, stack, timeout=timeout, must_score=must_score)


class TokenizingFake(ScriptedEngine):
    """A fake engine with the tokenizer of a directory, which returns no logprobs of prompts."""

    directory = TINY

    async def control(self, path, exchange) -> None:
        if path == "/tokenize":
            ids = Tokenizer(self.directory).encode(exchange.body["prompt"]).ids
            await exchange.reply({"tokens": ids.tolist()})
        else:
            await super().control(path, exchange)


async def test_a_server_without_prompt_logprobs_is_refused_as_a_scorer():
    async with TokenizingFake() as fake:
        await connect(fake.url, must_score=False)
        message = rf"models.teacher: {fake.url} sent a response without prompt logprobs; use a native or vLLM"
        with pytest.raises(EngineIncompatible, match=message):
            await connect(fake.url)


async def test_a_chat_endpoint_is_refused_as_a_scorer():
    class ChatFake(ScriptedEngine):
        def card(self) -> dict[str, object]:
            return {"id": "gpt", "owned_by": "openai"}

    async with ChatFake() as fake:
        with pytest.raises(EngineIncompatible, match=r"models.teacher: .*owned by 'openai'"):
            await connect(fake.url)


async def test_an_absent_server_is_named():
    with pytest.raises(ProviderError, match=r"models.teacher: no inference server came up within 0.3 s"):
        await connect("http://127.0.0.1:9", timeout=0.3)


async def test_a_server_that_does_not_tokenize_cannot_be_compared():
    async with ScriptedEngine() as fake:
        with pytest.raises(EngineIncompatible, match=r"models.teacher: .* does not tokenize a text"):
            await connect(fake.url)


async def test_special_tokens_are_compared(tmp_path):
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((TINY / file).read_bytes())
    table = json.loads((tmp_path / "tokenizer.json").read_text())
    first, second = table["added_tokens"][:2]
    first["content"], second["content"] = second["content"], first["content"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    async with TokenizingFake() as fake:
        fake.directory = tmp_path
        with pytest.raises(EngineIncompatible, match="another tokenizer"):
            await connect(fake.url, must_score=False)
