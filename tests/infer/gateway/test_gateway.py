"""The HTTP server of the gateway: API keys, errors, models, token counts, streams and shutdown."""

import asyncio
import logging
from typing import Any

import anthropic
import openai
import pytest

from ramify.infer.gateway import Gateway, RolloutLimits, RolloutSession
from ramify.trace import Trace
from tests.support.engine import check_tokens
from tests.support.scenario import make_session, user_request

HI: Any = [{"role": "user", "content": "hi"}]
PATHS = ["/chat/completions", "/responses", "/messages", "/messages/count_tokens", "/responses/input_tokens"]
CONTEXT_LINE = "This model's maximum context length is 20 tokens"  # by which agents recognize an overflow


async def test_a_wrong_or_missing_api_key_is_401_in_every_dialect(open_scenario):
    async with open_scenario([]) as scenario:
        for path in PATHS:
            for wrong in ("Basic x", "Bearer wrong", f"Bearer {scenario.endpoint.api_key}x"):
                assert (await scenario.post(path, {}, authorization=wrong)).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            await scenario.openai(api_key="wrong").chat.completions.create(model="x", messages=HI)
        with pytest.raises(anthropic.AuthenticationError, match="PeerRefused"):
            await scenario.anthropic(api_key="wrong").messages.create(model="x", messages=HI, max_tokens=5)
        assert (await scenario.post("/models", {})).status_code == 405
        assert (await scenario.post("/embeddings", {})).status_code == 404
        scenario.gateway.unregister(scenario.session)
        with pytest.raises(openai.AuthenticationError):
            await scenario.chat("hi")
        assert not scenario.engine.requests and scenario.session.secret not in repr(scenario.endpoint)


async def test_one_gateway_serves_several_rollouts_by_api_key(open_scenario):
    async with open_scenario(lambda _: "ok") as scenario:
        others = [
            RolloutSession(
                Trace(id=f"o{n}"), scenario.policy, sampling=scenario.session.sampling, limits=RolloutLimits()
            )
            for n in range(3)
        ]
        endpoints = [scenario.gateway.register(other) for other in others]
        clients = [scenario.openai(api_key=end.api_key) for end in endpoints]
        calls = [
            client.chat.completions.create(model="x", messages=[{"role": "user", "content": f"I am {n}"}])
            for n, client in enumerate(clients)
        ]
        await asyncio.gather(*calls)
        for n, other in enumerate(others):
            assert [node.message.text for node in other.trace.nodes] == [f"I am {n}", "ok"]
        assert not len(scenario.trace.nodes)


async def test_a_tool_may_call_the_model_through_the_endpoint_during_a_rollout(open_scenario):
    async with open_scenario(["one", "from a tool", "two"]) as scenario:
        reply = await scenario.session.generate(user_request("the task"))
        client = scenario.openai(base_url=scenario.endpoint.base_url)
        answer = await client.chat.completions.create(model=scenario.endpoint.model, messages=HI)
        assert answer.choices[0].message.content == "from a tool"
        await scenario.session.generate(user_request("and then?", parent_node=reply.node))
        assert scenario.reasons == ["new_conversation"] and len(scenario.trace.leaves) == 2
        assert all(node.is_trainable for node in scenario.trace.nodes)
        check_tokens(scenario.trace, scenario.engine)


async def test_all_models_are_listed_and_any_name_can_be_retrieved(open_scenario):
    async with open_scenario([]) as scenario:
        scenario.session.models["helper"] = scenario.policy
        assert [model.id async for model in scenario.openai().models.list()] == ["tiny", "helper"]
        assert [model.id async for model in scenario.anthropic().models.list()] == ["tiny", "helper"]
        assert (await scenario.openai().models.retrieve("gpt-x")).id == "gpt-x"


async def test_token_counts_equal_those_of_the_engine_and_record_nothing(open_scenario):
    async with open_scenario(["ok"]) as scenario:
        counted = await scenario.anthropic().messages.count_tokens(model="x", messages=HI, system="Be brief.")
        other = await scenario.openai().responses.input_tokens.count(model="x", input="hi", instructions="Be brief.")
        assert not len(scenario.trace.nodes) and scenario.session.num_turns == 0
        await scenario.anthropic().messages.create(model="x", messages=HI, system="Be brief.", max_tokens=9)
        assert counted.input_tokens == other.input_tokens == len(scenario.engine.samples[0][0])
        assert not scenario.reasons


async def test_an_exhausted_budget_is_400_and_not_retried_by_sdks(open_scenario):
    async with open_scenario(["ok"], limits=RolloutLimits(max_turns=1)) as scenario:
        await scenario.chat("hi")
        with pytest.raises(openai.BadRequestError) as chat:
            await scenario.openai().chat.completions.create(model="x", messages=HI, stream=True)
        assert chat.value.type == "BudgetExceeded" and chat.value.code == "budget_exceeded"
        with pytest.raises(openai.BadRequestError, match="max_turns"):
            await scenario.openai().responses.create(model="x", input="hi")
        with pytest.raises(anthropic.BadRequestError, match="BudgetExceeded"):
            await scenario.anthropic().messages.create(model="x", messages=HI, max_tokens=5)


async def test_a_context_overflow_has_the_error_code_that_agents_expect(open_scenario):
    async with open_scenario([], limits=RolloutLimits(seq_len=20)) as scenario:
        for length in (100, 100_000):  # the second is refused before it is rendered
            text = "x " * length
            with pytest.raises(openai.BadRequestError) as error:
                await scenario.chat(text)
            assert error.value.code == "context_length_exceeded" and error.value.type == "ContextOverflow"
            assert CONTEXT_LINE in error.value.message
            with pytest.raises(openai.BadRequestError, match=CONTEXT_LINE):
                await scenario.openai().responses.create(model="x", input=text)
            messages: Any = [{"role": "user", "content": text}]
            with pytest.raises(anthropic.BadRequestError, match=CONTEXT_LINE):
                await scenario.anthropic().messages.create(model="x", messages=messages, max_tokens=5)


async def test_system_failures_are_5xx_and_not_retried_by_sdks(open_scenario):
    async with open_scenario([], call_timeout=2.0) as scenario:
        scenario.engine.gate.clear()
        with pytest.raises(openai.InternalServerError) as error:
            await scenario.openai().chat.completions.create(model="x", messages=HI)
        assert error.value.status_code == 504 and len(scenario.engine.requests) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", b"{"),
        ("/chat/completions", b'{"messages": NaN}'),
        ("/chat/completions", []),
        ("/chat/completions", {}),
        ("/chat/completions", {"messages": []}),
        ("/chat/completions", {"messages": [{"role": "emperor", "content": "hi"}]}),
        ("/chat/completions", {"messages": HI, "n": 3}),
        ("/chat/completions", {"messages": HI, "seed": 10**30}),
        ("/chat/completions", {"messages": HI, "allowed_token_ids": [5]}),
        ("/chat/completions", {"messages": HI, "bad_words": ["no"]}),
        ("/chat/completions", {"messages": HI, "logits_processors": ["x"]}),
        ("/chat/completions", {"messages": HI, "use_beam_search": True}),
        ("/chat/completions", {"messages": HI, "best_of": 2}),
        ("/chat/completions", {"messages": HI, "continue_final_message": True}),
        ("/chat/completions", {"messages": HI, "add_generation_prompt": False}),
        ("/chat/completions", {"messages": [{"role": "user", "content": {"type": "text", "text": "hi"}}]}),
        ("/chat/completions", {"messages": [*HI, {"role": "tool", "tool_call_id": 5, "content": "x"}]}),
        ("/chat/completions", 100_000 * b"["),
        ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
        ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("/responses", {"input": "hi", "previous_response_id": "resp_nobody"}),
        ("/messages", {"messages": HI, "max_tokens": 0}),
        ("/messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": 5, "name": "f"}]}]}),
        ("/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
    ],
)
async def test_invalid_requests_are_400(open_scenario, path, body):
    async with open_scenario([]) as scenario:
        answer = await scenario.post(path, body)
        assert answer.status_code == 400 and "RequestInvalid" in answer.text
        assert answer.headers["x-should-retry"] == "false"


async def test_huge_numbers_and_deep_nesting_are_accepted(open_scenario):
    async with open_scenario(["ok"]) as scenario:
        deep = {"name": "f", "arguments": '{"x": ' + 5000 * "[" + 5000 * "]" + "}"}
        message = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": deep}]}
        tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"maximum": 10**30}}}}
        body = {
            "messages": [*HI, message, *HI],
            "tools": [{"type": "function", "function": tool}],
            "max_tokens": 10**30,
        }
        assert (await scenario.post("/chat/completions", body)).status_code == 200
        check_tokens(scenario.trace, scenario.engine)


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses", "/messages/count_tokens"])
async def test_json_that_is_nested_too_deeply_is_refused(open_scenario, path):
    async with open_scenario(lambda prompt: "hello") as scenario:
        for depth in (400, 900, 5000, 100_000):
            deep = depth * b'{"a":' + b"1" + depth * b"}"
            tool = b'{"type": "function", "name": "f", "parameters": %b, "input_schema": %b}' % (deep, deep)
            schema = b'{"type": "json_schema", "schema": %b}' % deep
            tools = b'[{"type": "function", "name": "f", "function": %b, "input_schema": %b}]' % (tool, deep)
            for body in (
                b'{"messages": %b, "input": %b}' % (deep, deep),
                b'{"messages": [{"role": "user", "content": "hi"}], "input": "hi", "tools": %b}' % tools,
                b'{"messages": [{"role": "user", "content": "hi"}], "input": "hi", "text": {"format": %b},'
                b' "response_format": %b, "output_format": %b}' % (schema, schema, schema),
            ):
                answer = await scenario.post(path, body)
                assert answer.status_code in (200, 400), (depth, answer.text)
                assert answer.status_code == 200 or answer.json()["error"], answer.text


async def test_a_lone_surrogate_becomes_a_question_mark(open_scenario):
    async with open_scenario(["ok"]) as scenario:
        body = b'{"messages": [{"role": "user", "content": "\\ud83d and \\ud83d\\ude00"}]}'
        assert (await scenario.post("/chat/completions", body)).status_code == 200
        assert scenario.trace.nodes[0].message.text == "? and \U0001f600"


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
async def test_a_waiting_stream_sends_keepalives_and_then_its_error(open_scenario, path):
    async with open_scenario([], quick_keepalive=True, call_timeout=0.5) as scenario:
        scenario.engine.gate.clear()
        answer = await scenario.post(path, {"messages": HI, "input": "hi", "max_tokens": 9, "stream": True})
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.startswith("event: ping" if path == "/messages" else ": waiting")
        assert "DeadlineExceeded" in answer.text


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_sdks_accept_a_stream_with_keepalives(open_scenario, dialect):
    async with open_scenario(["hello there"], quick_keepalive=True) as scenario:
        scenario.engine.gate.clear()
        asyncio.get_running_loop().call_later(0.1, scenario.engine.gate.set)
        if dialect == "chat":
            stream = await scenario.openai().chat.completions.create(model="x", messages=HI, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        elif dialect == "responses":
            stream = await scenario.openai().responses.create(model="x", input="hi", stream=True)
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        else:
            async with scenario.anthropic().messages.stream(model="x", messages=HI, max_tokens=50) as stream:
                text = await stream.get_final_text()
        assert text == "hello there"


async def test_a_truncated_reply_is_marked_in_every_dialect(open_scenario):
    async with open_scenario(lambda _: "hello there") as scenario:
        chat = await scenario.chat("hi", max_completion_tokens=3)
        assert chat.choices[0].finish_reason == "length"
        response = await scenario.openai().responses.create(model="x", input="hi", max_output_tokens=3)
        assert response.status == "incomplete" and response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        message = await scenario.anthropic().messages.create(model="x", messages=HI, max_tokens=3)
        assert message.stop_reason == "max_tokens"
        assert [len(ids) for _, ids, _ in scenario.engine.samples] == [3, 3, 3]


async def test_unknown_fields_of_agent_programs_are_ignored(open_scenario):
    patch = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    async with open_scenario(["hello", patch, "good"]) as scenario:
        extra: Any = {"context_management": {}, "output_config": {"effort": "high"}, "metadata": {"user_id": "u"}}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        system = [
            {"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Kind."},
        ]
        body = {"model": "x", "max_tokens": 90, "system": system, "messages": HI, "thinking": thinking, **extra}
        assert (await scenario.post("/messages?beta=true", body)).status_code == 200
        codex: Any = {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "store": False}
        codex |= {"client_metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "parallel_tool_calls": True}
        tools = [{"type": "custom", "name": "patch", "description": "Apply."}, {"type": "web_search"}]
        items = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Kind."}]}, *HI]
        body = {"model": "x", "instructions": "Be.", "input": items, "tools": tools, "tool_choice": "auto", **codex}
        answer = (await scenario.post("/responses", body)).json()
        (call,) = answer["output"]
        assert call["type"] == "custom_tool_call" and call["input"] == "*** Begin"
        items += [call, {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}]
        assert (await scenario.post("/responses", body)).json()["output"][0]["content"][0]["text"] == "good"
        assert [node.message.text for node in scenario.trace.nodes if node.message.role == "system"] == [
            "Be.\n\nKind."
        ] * 2
        assert len(scenario.trace.leaves) == 2
        check_tokens(scenario.trace, scenario.engine)


async def test_a_response_can_be_continued_by_its_id(open_scenario):
    async with open_scenario(["one", "two"]) as scenario:
        first = await scenario.openai().responses.create(model="x", input="hi", instructions="Be brief.")
        await scenario.openai().responses.create(model="x", input="more", previous_response_id=first.id)
        assert [node.message.text for node in scenario.trace.nodes] == ["Be brief.", "hi", "one", "more", "two"]
        check_tokens(scenario.trace, scenario.engine)


async def test_a_stop_string_truncates_the_text_before_it(open_scenario):
    async with open_scenario(lambda _: "letter") as scenario:
        assert (await scenario.chat("hi", stop="tt")).choices[0].message.content == "le"
        message: Any = await scenario.anthropic().messages.create(
            model="x", messages=HI, max_tokens=50, stop_sequences=["er"]
        )
        assert message.content[0].text == "lett"


async def test_api_keys_are_not_logged(open_scenario, caplog):
    with caplog.at_level(logging.DEBUG, logger="uvicorn"), caplog.at_level(logging.DEBUG, logger="ramify"):
        async with open_scenario(["ok"]) as scenario:
            await scenario.chat("hi")
            await scenario.post("/chat/completions", b"{")
            assert scenario.endpoint.api_key not in caplog.text


async def test_closing_the_gateway_cancels_running_calls_and_leaves_no_task():
    session, token_client = make_session(["ok"])
    token_client.gate.clear()
    async with Gateway() as gateway:
        end = gateway.register(session)
        client = openai.AsyncOpenAI(base_url=end.base_url, api_key=end.api_key, max_retries=0)
        call = asyncio.create_task(client.chat.completions.create(model="x", messages=HI))
        while not token_client.requests:
            await asyncio.sleep(0.002)
    with pytest.raises(openai.APIError):
        await call
    await client.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
