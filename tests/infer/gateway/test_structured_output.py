"""Structured output through the gateway, with the native engine: it is recorded exactly, and not trained on."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from ramify.core.errors import RequestInvalid
from ramify.infer.client import InferenceClient
from ramify.infer.dialects.anthropic_messages import MessagesDialect
from ramify.infer.dialects.base import Dialect
from ramify.infer.dialects.openai_chat import ChatCompletionsDialect
from ramify.infer.dialects.openai_responses import ResponsesDialect
from ramify.infer.dialects.response_store import ResponseStore
from ramify.infer.dialects.structured_output import format_constraint
from ramify.infer.gateway import Gateway, RolloutLimits, RolloutSession, SamplingConfig, TokenPolicy
from ramify.infer.gateway.recorder import STRUCTURED_OUTPUT_REASON
from ramify.model.render import ReplyConstraint
from ramify.model.resolve import resolve_model_path
from ramify.trace import Trace
from tests.support.engine import TINY, check_tokens
from tests.support.models import build_core
from tests.support.native_server import run_server
from tests.support.scenario import make_session, user_request

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}},
    "required": ["color"],
    "additionalProperties": False,
}
FUNCTION = {"name": "paint", "description": "Paint it.", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", **FUNCTION}
MESSAGES_TOOL = {"name": "paint", "description": "Paint it.", "input_schema": SCHEMA}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "color", "schema": SCHEMA, "strict": True}}
USER = {"role": "user", "content": "Which colour?"}


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    core = build_core(resolve_model_path("tiny"), dtype="float32", kv_cache_tokens=8192)
    with run_server(core, name="tiny", renderer=TINY) as (url, _):
        yield url


def is_color(value: Any) -> bool:
    return value in ({"color": "red"}, {"color": "green"})


async def test_structured_output_of_all_dialects_is_recorded_but_not_trained(engine_url):
    async with InferenceClient(engine_url) as client, Gateway() as gateway:
        policy, trace = TokenPolicy(client, TINY, "tiny", max_model_len=2048), Trace(id="t1")
        session = RolloutSession(
            trace, policy, sampling=SamplingConfig(max_tokens=100), limits=RolloutLimits(), seed=1, is_training=True
        )
        end = gateway.register(session)
        options = {"base_url": end.base_url, "api_key": end.api_key, "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as sdk, anthropic.AsyncAnthropic(**options) as messages:
            await check_dialects(sdk, messages)
        trained = [node.is_trainable for node in trace.nodes if node.message.role == "assistant"]
        assert trained == [False, True, False, False, False, False]
        assert [entry["reason"] for entry in trace.info["untrained"]] == [STRUCTURED_OUTPUT_REASON] * 5
        assert trace.metrics["untrained/structured_output"] == 5
        assert "render/breaks" not in trace.metrics and "refusals" not in trace.info
        first = next(node for node in trace.nodes if node.message.role == "assistant")
        scored = await client.score(trace.graph.path_tokens(first.index).tolist())
        sampled = np.array(first.logprobs)
        expected = scored[-len(sampled) :]
        assert (sampled >= expected - 1e-3).all() and sampled.sum() > expected.sum()  # over fewer tokens


async def check_dialects(sdk: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
    chat: Any = sdk.chat.completions.create
    reply = await chat(model="x", messages=[USER], response_format=JSON_FORMAT)
    text = reply.choices[0].message.content
    assert is_color(json.loads(text)) and reply.choices[0].finish_reason == "stop"
    history = [USER, {"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    await chat(model="x", messages=history, max_tokens=8)  # trained, after a reply that is not
    stream = await chat(model="x", messages=[USER], tools=[CHAT_TOOL], tool_choice="required", stream=True)
    calls = [call async for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert "".join(call.function.arguments or "" for call in calls).startswith("{")
    create: Any = sdk.responses.create
    text_format = {"type": "json_schema", "name": "color", "schema": SCHEMA, "strict": True}
    response = await create(model="x", input="Which colour?", text={"format": text_format})
    assert is_color(json.loads(response.output_text))
    choice = {"type": "function", "name": "paint"}
    response = await create(model="x", input="Which colour?", tools=[RESPONSES_TOOL], tool_choice=choice)
    assert response.output[-1].type == "function_call" and is_color(json.loads(response.output[-1].arguments))
    send: Any = messages.messages.create
    message = await send(
        model="x", messages=[USER], max_tokens=100, tools=[MESSAGES_TOOL], tool_choice={"type": "tool", "name": "paint"}
    )
    assert message.stop_reason == "tool_use" and is_color(message.content[-1].input)


@pytest.mark.parametrize(
    ("dialect", "body", "expected"),
    [
        (ChatCompletionsDialect(), {"response_format": JSON_FORMAT}, ReplyConstraint(SCHEMA, True)),
        (ChatCompletionsDialect(), {"response_format": {"type": "text"}}, None),
        (ChatCompletionsDialect(), {"tools": [CHAT_TOOL], "tool_choice": "auto"}, None),
        (ChatCompletionsDialect(), {"tools": [CHAT_TOOL], "tool_choice": "none", "parallel_tool_calls": False}, None),
        (
            ChatCompletionsDialect(),
            {"tools": [CHAT_TOOL], "tool_choice": "required"},
            ReplyConstraint(tool_names=("paint",)),
        ),
        (
            ChatCompletionsDialect(),
            {"tools": [CHAT_TOOL], "response_format": {"type": "json_object"}},
            ReplyConstraint({"type": "object"}, False, ("paint",)),
        ),
        (
            ResponsesDialect(),
            {"tools": [RESPONSES_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            ReplyConstraint(tool_names=("paint",), allows_parallel_calls=False),
        ),
        (
            MessagesDialect(),
            {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            ReplyConstraint(tool_names=("paint",), allows_parallel_calls=False),
        ),
        (MessagesDialect(), {"output_format": {"type": "json_schema", "schema": SCHEMA}}, ReplyConstraint(SCHEMA)),
        (
            MessagesDialect(),
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            ReplyConstraint(SCHEMA),
        ),
    ],
)
def test_fields_of_each_dialect(dialect: Dialect, body: dict[str, Any], expected: ReplyConstraint | None):
    full_body = {"messages": [USER], "input": "Which colour?", **body}
    assert dialect.parse_request(full_body, ResponseStore()).request.constraint == expected
    assert not {"response_format", "text", "output_format", "output_config"} & set(dialect.find_ignored_fields(body))


def test_begun_reply_with_structured_output_is_refused():
    body = {"messages": [USER, {"role": "assistant", "content": "{"}], "output_format": JSON_FORMAT}
    with pytest.raises(RequestInvalid, match="begins the reply"):
        MessagesDialect().parse_request(body, ResponseStore())


async def test_equal_messages_with_another_constraint_are_another_call():
    session, client = make_session(['{"color": "red"}', "5"])
    first = session.start_call(user_request("?", constraint=ReplyConstraint(SCHEMA)))
    second = session.start_call(user_request("?", constraint=ReplyConstraint({"const": 5}), retry_count=1))
    await asyncio.gather(first.wait(), second.wait())
    grammars = [sampling.grammar for sampling in client.requests]
    assert "red" in str(grammars[0]) and '"const": 5' in str(grammars[1])


@pytest.mark.parametrize(
    ("constraint", "fields"),
    [
        (
            ReplyConstraint(SCHEMA, True),
            {"response_format": {**JSON_FORMAT, "json_schema": {"name": "reply", "schema": SCHEMA, "strict": True}}},
        ),
        (ReplyConstraint({"type": "object"}), {"response_format": {"type": "json_object"}}),
        (ReplyConstraint(tool_names=("a", "b")), {"tool_choice": "required"}),
        (
            ReplyConstraint(tool_names=("a",), allows_parallel_calls=False),
            {"tool_choice": {"type": "function", "function": {"name": "a"}}, "parallel_tool_calls": False},
        ),
    ],
)
def test_chat_endpoints_get_the_constraint_as_fields(constraint, fields):
    assert format_constraint(constraint) == fields


CALL_TEXT = '<tool_call>\n{"name": "paint", "arguments": {"color": "red"}}\n</tool_call>'


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
async def test_text_of_a_call_is_content_if_calls_are_forbidden(open_scenario, path: str):
    async with open_scenario([CALL_TEXT] * 3) as scenario:
        choice = {"type": "none"} if path == "/messages" else "none"
        tools = {"/chat/completions": CHAT_TOOL, "/responses": RESPONSES_TOOL, "/messages": MESSAGES_TOOL}
        fields = {"tools": [tools[path]], "tool_choice": choice, "max_tokens": 100}
        first = (await scenario.post(path, {"messages": [USER], "input": [USER], **fields})).json()
        reply = {
            "/chat/completions": lambda: first["choices"][0]["message"],
            "/responses": lambda: first["output"][0],
            "/messages": lambda: {"role": "assistant", "content": first["content"]},
        }[path]()
        assert CALL_TEXT in scenario.trace.nodes[-1].message.text and not scenario.trace.nodes[-1].message.tool_calls
        assert json.dumps(CALL_TEXT)[1:-1] in json.dumps(reply) and not reply.get("tool_calls")
        history = [USER, reply, {"role": "user", "content": "Why?"}]
        await scenario.post(path, {"messages": history, "input": history, **fields})
        assert len(scenario.trace.leaves) == 1 and not scenario.reasons, "the second call continues the first reply"
        fields["tool_choice"] = {"type": "auto"} if path == "/messages" else "auto"
        await scenario.post(path, {"messages": [USER], "input": [USER], **fields})
        assert scenario.trace.nodes[-1].message.tool_calls
        check_tokens(scenario.trace, scenario.engine)


async def test_equal_messages_with_another_tool_choice_are_another_call():
    session, _ = make_session([CALL_TEXT] * 2)
    first = session.start_call(user_request("?", allows_calls=False))
    second = session.start_call(user_request("?", retry_count=1))
    replies = await asyncio.gather(first.wait(), second.wait())
    assert [len(reply.message.tool_calls) for reply in replies] == [0, 1]
