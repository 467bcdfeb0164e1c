"""A policy behind a chat endpoint: it has no tokens, counts them from the usage, and sends images."""

import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ramify.core.errors import BudgetExceeded, ContextOverflow, EngineIncompatible, ProviderError, RequestInvalid
from ramify.infer.gateway import ChatPolicy, ModelRequest, RolloutLimits, RolloutSession, SamplingConfig
from ramify.trace import Message, Trace, decode_trace, encode_trace
from tests.support.engine import ScriptedEngine, check_tokens
from tests.support.scenario import Scenario, user_request

PIXEL = base64.b64encode(b"a picture").decode()


@contextlib.asynccontextmanager
async def open_chat_session(answers: list[Any], **limits: int) -> AsyncIterator[tuple[RolloutSession, ScriptedEngine]]:
    """Open a session whose policy is an endpoint with these responses."""
    async with ScriptedEngine(answers) as endpoint:
        policy = ChatPolicy(f"{endpoint.url}/v1", "big-model", "key", retries=2, backoff=0.001)
        yield (
            RolloutSession(Trace(id="t1"), policy, sampling=SamplingConfig(), limits=RolloutLimits(**limits)),
            endpoint,
        )
        await policy.close()


async def test_a_conversation_is_recorded_without_tokens_and_counted_from_usage():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tools = ({"type": "function", "function": {"name": "f", "description": "", "parameters": {}}},)

    answers = [{"content": None, "reasoning_content": "hm", "tool_calls": [call]}, "done"]
    async with open_chat_session(answers) as (session, endpoint):
        reply = await session.generate(user_request("one two three", tools=tools, model="gpt-x"))
        assert (
            reply.finish_reason == "tool_calls" and reply.message.reasoning == "hm" and reply.usage.cached_tokens == 1
        )
        result = Message("tool", "four five", tool_call_id="c1")
        await session.generate(
            ModelRequest(
                (result,), tools, parent_node=reply.node, sampling_overrides={"temperature": 0.5, "stop": ["x"]}
            )
        )
        trace = decode_trace(encode_trace(session.trace))
        assert [node.message.role for node in trace.nodes] == ["user", "assistant", "tool", "assistant"]
        assert (
            len(trace.leaves) == 1
            and trace.graph.tokens.size == 0
            and not any(n.is_trainable for n in trace.nodes if n.call)
        )
        assert trace.info["token_counts"] == "usage"
        assert (session.num_turns, session.budget.output_tokens) == (2, 6) and session.budget.input_tokens == 10
        second = endpoint.requests[1]
        assert second["model"] == "big-model" and second["temperature"] == 0.5 and second["stop"] == ["x"]
        assert second["messages"][1]["tool_calls"] == [call] and second["messages"][2]["tool_call_id"] == "c1"
        assert second["tools"] and "max_tokens" not in second


def test_a_policy_without_tokens_cannot_be_trained_on():
    policy = ChatPolicy("http://localhost:1/v1", "big-model", retries=0)
    with pytest.raises(EngineIncompatible, match="big-model"):
        RolloutSession(Trace(id="t1"), policy, sampling=SamplingConfig(), limits=RolloutLimits(), is_training=True)


async def test_forks_are_recorded_without_tokens():
    async with open_chat_session(["one", "two", "three"]) as (session, _):
        for _ in range(2):
            await session.generate(user_request("a"))
        await session.generate(
            ModelRequest((Message("user", "a"), Message("assistant", "other"), Message("user", "b")))
        )
        assert [fork["reason"] for fork in session.trace.info["forks"]] == ["sample", "edited"]
        assert [node.parent for node in session.trace.nodes] == [-1, 0, 0, 0, 3, 4]


async def test_temporary_failures_are_retried_and_others_raised():
    answers = [
        (500, "oops"),
        (503, "full"),
        "fine",
        (400, "maximum context length is 5"),
        (422, "no"),
        *[(500, "oops")] * 3,
    ]

    async with open_chat_session(answers) as (session, _):
        assert (await session.generate(user_request("a"))).message.text == "fine"
        for kind in (ContextOverflow, RequestInvalid):
            with pytest.raises(kind):
                await session.generate(user_request("a"))
        with pytest.raises(ProviderError, match="oops"):
            await session.generate(user_request("a"))


async def test_budgets_use_the_token_counts_of_the_endpoint():
    async with open_chat_session(["one", "two"], max_output_tokens=5) as (session, endpoint):
        await session.generate(user_request("a"))
        await session.generate(user_request("b"))
        assert [body["max_tokens"] for body in endpoint.requests] == [5, 2]
        with pytest.raises(BudgetExceeded, match="max_output_tokens"):
            await session.generate(user_request("c"))


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "link"])
async def test_images_are_sent_to_the_endpoint_and_stored_in_the_trace(open_scenario, dialect):
    url = "http://host/picture.png" if dialect == "link" else f"data:image/png;base64,{PIXEL}"
    link = {"type": "image_url", "image_url": {"url": url}}

    async def ask(scenario: Scenario, key: str) -> None:
        if dialect == "messages":
            source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
            content: Any = [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
            client = scenario.anthropic(api_key=key)
            await client.messages.create(model="x", max_tokens=9, messages=[{"role": "user", "content": content}])
        elif dialect == "responses":
            content = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url}]
            await scenario.openai(api_key=key).responses.create(model="x", input=[{"role": "user", "content": content}])
        else:
            messages: Any = [{"role": "user", "content": [{"type": "text", "text": "see"}, link]}]
            await scenario.openai(api_key=key).chat.completions.create(model="x", messages=messages)

    async with open_scenario([]) as scenario:
        async with open_chat_session(["nice"]) as (session, endpoint):
            await ask(scenario, scenario.gateway.register(session).api_key)
            scenario.gateway.unregister(session)
        content = [{"type": "text", "text": "see"}, link]
        assert endpoint.requests[0]["messages"] == [{"role": "user", "content": content}]
        (media,) = session.trace.graph.media
        assert media.data == (url.encode() if dialect == "link" else b"a picture")
        assert session.trace.nodes[0].message.content[1].hash == media.hash


async def test_a_gateway_can_be_the_endpoint_of_another_session(open_scenario):
    async with open_scenario(["one", "two"]) as scenario:
        policy = ChatPolicy(scenario.endpoint.base_url, "tiny", scenario.endpoint.api_key, retries=0)
        outer = RolloutSession(Trace(id="o1"), policy, sampling=SamplingConfig(), limits=RolloutLimits())
        reply = await outer.generate(user_request("a"))
        await outer.generate(user_request("b", parent_node=reply.node))
        await policy.close()
        assert [node.message for node in outer.trace.nodes] == [node.message for node in scenario.trace.nodes]
        assert len(scenario.trace.leaves) == 1 and outer.budget.output_tokens == scenario.session.budget.output_tokens
        check_tokens(scenario.trace, scenario.engine)
