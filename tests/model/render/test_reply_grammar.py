"""A reply that follows a grammar is parsed as what the grammar was built for, in every format of tool calls."""

import json
import random

import llguidance
import numpy as np
import pytest

from ramify.core.errors import RequestInvalid
from ramify.model.render import ParsedReply, Renderer, ReplyConstraint
from ramify.trace import Message
from tests.support.renderers import MODELS, renderer

SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "maxLength": 8},
        "limit": {"$ref": "#/$defs/limit"},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
        "page": {"type": "integer"},
    },
    "required": ["query", "limit", "mode"],
    "additionalProperties": False,
    "$defs": {"limit": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "search", "parameters": SEARCH}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
MAX_TOKENS = 200


def sample_reply(renderer: Renderer, constraint: ReplyConstraint, seed: int) -> ParsedReply | None:
    """Sample tokens that the grammar allows, and stop as soon as it may end; None if that takes too long."""
    prompt = renderer.render([Message("user", "hi")], TOOLS if constraint.tool_names else ())
    tokenizer = llguidance.LLTokenizer(renderer.tokenizer.backend.to_str(), eos_token=list(renderer.stop_ids))
    matcher = llguidance.LLMatcher(tokenizer, renderer.build_grammar(prompt, constraint), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    rng, ids = random.Random(seed), list[int]()
    while len(ids) < MAX_TOKENS:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: tokenizer.vocab_size]).tolist()
        stops = [id for id in allowed if id in renderer.stop_ids]
        closing = [id for id in allowed if (renderer.tokenizer.id_to_token(id) or "")[:1] in '"}]<']
        ids.append(stops[0] if stops else rng.choice(closing if closing and rng.random() < 0.7 else allowed))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
        if stops:
            return renderer.parse(ids, prompt)
    return None


@pytest.mark.parametrize("model", [model for model in MODELS if model.tools], ids=str)
def test_required_calls_are_parsed_without_problems(model):
    constraint = ReplyConstraint(tool_names=("search", "now"))
    replies = [reply for seed in range(2) if (reply := sample_reply(renderer(model.name), constraint, seed))]
    assert replies
    for reply in replies:
        assert reply.message.tool_calls and not reply.problems
        for call in reply.message.tool_calls:
            arguments = json.loads(call.arguments)
            if call.name == "search":
                assert isinstance(arguments["query"], str) and arguments["limit"] in range(1, 10)
                assert arguments["mode"] in ("fast", "slow")
            else:
                assert (call.name, arguments) == ("now", {})


@pytest.mark.parametrize("model", ["qwen3", "llama-3.1", "mistral-v3", "gemma"])
def test_json_reply_is_the_content(model):
    constraint = ReplyConstraint({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
    replies = [reply for seed in range(2) if (reply := sample_reply(renderer(model), constraint, seed))]
    assert replies
    for reply in replies:
        assert isinstance(json.loads(reply.message.text)["ok"], bool) and not reply.message.tool_calls


def test_named_tool_is_called_once():
    constraint = ReplyConstraint(tool_names=("now",), allows_parallel_calls=False)
    reply = sample_reply(renderer("qwen2.5"), constraint, 0)
    assert reply and [call.name for call in reply.message.tool_calls] == ["now"]


@pytest.mark.parametrize(
    ("model", "start"),
    [("deepseek-r1", "reasoning "), ("qwen3", "("), ("qwen3-no-thinking", " (%json"), ("qwen2.5", " (%json")],
)
def test_reasoning_is_required_if_the_prompt_opens_it_and_else_optional(model, start):
    prompt = renderer(model).render([Message("user", "hi")])
    grammar = renderer(model).build_grammar(prompt, ReplyConstraint({"const": 1}))
    assert grammar.partition("start: ")[2].startswith(start)


def test_model_without_tool_calls_refuses_them_by_name():
    chat = renderer("chatml")
    prompt = chat.render([Message("user", "hi")])
    with pytest.raises(RequestInvalid, match="no known format of tool calls"):
        chat.build_grammar(prompt, ReplyConstraint(tool_names=("now",)))
