"""The HTTP server: whose request it is, what is refused in which words, models, counts, streams, and its end."""

import asyncio
import logging
from typing import Any

import anthropic
import openai
import pytest

from ramify.errors import PortTaken
from ramify.gateway import Gateway, RolloutLimits, RolloutSession
from ramify.trace import Trace
from tests.gateway.engine import check_tokens
from tests.gateway.sampler import session_of, user
from tests.gateway.stage import Stage

HI: Any = [{"role": "user", "content": "hi"}]
PATHS = ["/chat/completions", "/responses", "/messages", "/messages/count_tokens", "/responses/input_tokens"]


def test_a_wrong_or_missing_secret_is_401_in_every_dialect(play):
    async def act(stage: Stage) -> None:
        for path in PATHS:
            for wrong in ("Basic x", "Bearer wrong", f"Bearer {stage.endpoint.api_key}x"):
                assert (await stage.post(path, {}, authorization=wrong)).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            await stage.openai(api_key="wrong").chat.completions.create(model="x", messages=HI)
        with pytest.raises(anthropic.AuthenticationError, match="SecretUnknown"):
            await stage.anthropic(api_key="wrong").messages.create(model="x", messages=HI, max_tokens=5)
        assert (await stage.post("/models", {})).status_code == 405
        assert (await stage.post("/embeddings", {})).status_code == 404
        stage.gateway.unregister(stage.session)
        with pytest.raises(openai.AuthenticationError):
            await stage.chat("hi")
        assert not stage.engine.asked and stage.session.secret not in repr(stage.endpoint)

    play([], act)


def test_one_gateway_serves_many_rollouts_each_by_its_secret(play):
    async def act(stage: Stage) -> None:
        others = [
            RolloutSession(Trace(id=f"o{n}"), stage.policy, sampling=stage.session.sampling, limits=RolloutLimits())
            for n in range(3)
        ]
        endpoints = [stage.gateway.register(other) for other in others]
        clients = [stage.openai(api_key=end.api_key) for end in endpoints]
        calls = [
            client.chat.completions.create(model="x", messages=[{"role": "user", "content": f"I am {n}"}])
            for n, client in enumerate(clients)
        ]
        await asyncio.gather(*calls)
        for n, other in enumerate(others):
            assert [node.message.text for node in other.trace.nodes] == [f"I am {n}", "ok"]
        assert not len(stage.trace.nodes)

    play(lambda _: "ok", act)


def test_a_tool_may_ask_the_model_through_the_endpoint_while_the_rollout_goes_on(play):
    async def act(stage: Stage) -> None:
        reply = await stage.session.generate(user("the task"))
        client = stage.openai(base_url=stage.endpoint.base_url)
        answer = await client.chat.completions.create(model=stage.endpoint.model, messages=HI)
        assert answer.choices[0].message.content == "from a tool"
        await stage.session.generate(user("and then?", parent_node=reply.node))
        assert stage.reasons == ["new_conversation"] and len(stage.trace.leaves) == 2
        assert all(node.is_trainable for node in stage.trace.nodes)
        check_tokens(stage.trace, stage.engine)

    play(["one", "from a tool", "two"], act)


def test_the_policy_and_mapped_models_are_listed_and_any_name_is_found(play):
    async def act(stage: Stage) -> None:
        stage.session.models["helper"] = stage.policy
        assert [model.id async for model in stage.openai().models.list()] == ["tiny", "helper"]
        assert [model.id async for model in stage.anthropic().models.list()] == ["tiny", "helper"]
        assert (await stage.openai().models.retrieve("gpt-x")).id == "gpt-x"

    play([], act)


def test_tokens_are_counted_as_the_engine_sees_them_and_nothing_is_recorded(play):
    async def act(stage: Stage) -> None:
        counted = await stage.anthropic().messages.count_tokens(model="x", messages=HI, system="Be brief.")
        other = await stage.openai().responses.input_tokens.count(model="x", input="hi", instructions="Be brief.")
        assert not len(stage.trace.nodes) and stage.session.num_turns == 0
        await stage.anthropic().messages.create(model="x", messages=HI, system="Be brief.", max_tokens=9)
        assert counted.input_tokens == other.input_tokens == len(stage.engine.seen[0][0])
        assert not stage.reasons

    play(["ok"], act)


def test_what_the_policy_used_up_is_a_400_that_sdks_do_not_send_again(play):
    async def act(stage: Stage) -> None:
        await stage.chat("hi")
        with pytest.raises(openai.BadRequestError) as chat:
            await stage.openai().chat.completions.create(model="x", messages=HI, stream=True)
        assert chat.value.type == "BudgetExceeded" and chat.value.code == "budget_exceeded"
        with pytest.raises(openai.BadRequestError, match="max_turns"):
            await stage.openai().responses.create(model="x", input="hi")
        with pytest.raises(anthropic.BadRequestError, match="BudgetExceeded"):
            await stage.anthropic().messages.create(model="x", messages=HI, max_tokens=5)

    play(["ok"], act, limits=RolloutLimits(max_turns=1))


def test_an_overflow_says_so_in_the_words_agents_look_for(play):
    async def act(stage: Stage) -> None:
        with pytest.raises(openai.BadRequestError) as error:
            await stage.chat("x" * 100)
        assert error.value.code == "context_length_exceeded" and error.value.type == "ContextOverflow"

    play([], act, limits=RolloutLimits(seq_len=20))


def test_failures_of_the_system_are_5xx_and_not_sent_again(play):
    async def act(stage: Stage) -> None:
        stage.engine.gate.clear()
        with pytest.raises(openai.InternalServerError) as error:
            await stage.openai().chat.completions.create(model="x", messages=HI)
        assert error.value.status_code == 504 and len(stage.engine.asked) == 1

    play([], act, call_timeout=0.5, max_retries=0)


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
def test_requests_that_cannot_be_read_are_400_by_name(play, path, body):
    async def act(stage: Stage) -> None:
        answer = await stage.post(path, body)
        assert answer.status_code == 400 and "RequestInvalid" in answer.text
        assert answer.headers["x-should-retry"] == "false"

    play([], act)


def test_numbers_and_depths_that_only_json_knows_are_taken_as_they_are(play):
    async def act(stage: Stage) -> None:
        deep = {"name": "f", "arguments": '{"x": ' + 5000 * "[" + 5000 * "]" + "}"}
        said = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": deep}]}
        tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"maximum": 10**30}}}}
        body = {"messages": [*HI, said, *HI], "tools": [{"type": "function", "function": tool}], "max_tokens": 10**30}
        assert (await stage.post("/chat/completions", body)).status_code == 200
        check_tokens(stage.trace, stage.engine)

    play(["ok"], act)


def test_half_a_character_as_javascript_sends_it_is_read_as_a_question_mark(play):
    async def act(stage: Stage) -> None:
        body = b'{"messages": [{"role": "user", "content": "\\ud83d and \\ud83d\\ude00"}]}'
        assert (await stage.post("/chat/completions", body)).status_code == 200
        assert stage.trace.nodes[0].message.text == "? and \U0001f600"

    play(["ok"], act)


def test_images_are_refused_by_name_by_a_policy_that_sees_none(play):
    async def act(stage: Stage) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
        answer = await stage.post("/chat/completions", {"messages": [{"role": "user", "content": [image]}]})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "TemplateRefused"

    play([], act)


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
def test_a_stream_that_waits_says_so_and_a_failure_in_it_is_told_in_it(play, path):
    async def act(stage: Stage) -> None:
        stage.engine.gate.clear()
        answer = await stage.post(path, {"messages": HI, "input": "hi", "max_tokens": 9, "stream": True})
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.startswith("event: ping" if path == "/messages" else ": waiting")
        assert "DeadlineExceeded" in answer.text

    play([], act, hasty=True, call_timeout=0.5)


@pytest.mark.parametrize("converse", ["chat", "responses", "messages"])
def test_sdks_read_a_stream_that_waited(play, converse):
    async def act(stage: Stage) -> None:
        stage.engine.gate.clear()
        asyncio.get_running_loop().call_later(0.1, stage.engine.gate.set)
        if converse == "chat":
            stream = await stage.openai().chat.completions.create(model="x", messages=HI, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        elif converse == "responses":
            stream = await stage.openai().responses.create(model="x", input="hi", stream=True)
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        else:
            async with stage.anthropic().messages.stream(model="x", messages=HI, max_tokens=50) as stream:
                text = await stream.get_final_text()
        assert text == "hello there"

    play(["hello there"], act, hasty=True)


def test_a_reply_cut_short_says_so_in_every_dialect(play):
    async def act(stage: Stage) -> None:
        chat = await stage.chat("hi", max_completion_tokens=3)
        assert chat.choices[0].finish_reason == "length"
        response = await stage.openai().responses.create(model="x", input="hi", max_output_tokens=3)
        assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
        message = await stage.anthropic().messages.create(model="x", messages=HI, max_tokens=3)
        assert message.stop_reason == "max_tokens"
        assert [len(ids) for _, ids, _ in stage.engine.seen] == [3, 3, 3]

    play(lambda _: "hello there", act)


def test_what_agent_programs_send_besides_is_left_aside(play):
    async def act(stage: Stage) -> None:
        extra: Any = {"context_management": {}, "output_config": {"effort": "high"}, "metadata": {"user_id": "u"}}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        system = [
            {"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Kind."},
        ]
        body = {"model": "x", "max_tokens": 90, "system": system, "messages": HI, "thinking": thinking, **extra}
        assert (await stage.post("/messages?beta=true", body)).status_code == 200
        codex: Any = {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "store": False}
        codex |= {"client_metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "parallel_tool_calls": True}
        tools = [{"type": "custom", "name": "patch", "description": "Apply."}, {"type": "web_search"}]
        items = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Kind."}]}, *HI]
        body = {"model": "x", "instructions": "Be.", "input": items, "tools": tools, "tool_choice": "auto", **codex}
        answer = (await stage.post("/responses", body)).json()
        (call,) = answer["output"]
        assert call["type"] == "custom_tool_call" and call["input"] == "*** Begin"
        items += [call, {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}]
        assert (await stage.post("/responses", body)).json()["output"][0]["content"][0]["text"] == "good"
        assert [node.message.text for node in stage.trace.nodes if node.message.role == "system"] == [
            "Be.\n\nKind."
        ] * 2
        assert len(stage.trace.leaves) == 2
        check_tokens(stage.trace, stage.engine)

    patch = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    play(["hello", patch, "good"], act)


def test_a_response_may_be_continued_by_its_id(play):
    async def act(stage: Stage) -> None:
        first = await stage.openai().responses.create(model="x", input="hi", instructions="Be brief.")
        await stage.openai().responses.create(model="x", input="more", previous_response_id=first.id)
        assert [node.message.text for node in stage.trace.nodes] == ["Be brief.", "hi", "one", "more", "two"]
        check_tokens(stage.trace, stage.engine)

    play(["one", "two"], act)


def test_a_stop_string_of_a_client_ends_the_text_before_it(play):
    async def act(stage: Stage) -> None:
        assert (await stage.chat("hi", stop="tt")).choices[0].message.content == "le"
        message = await stage.anthropic().messages.create(model="x", messages=HI, max_tokens=50, stop_sequences=["er"])
        assert message.content[0].text == "lett"

    play(lambda _: "letter", act)


def test_nothing_of_a_secret_is_logged(play, caplog):
    async def act(stage: Stage) -> None:
        await stage.chat("hi")
        await stage.post("/chat/completions", b"{")
        assert stage.endpoint.api_key not in caplog.text

    with caplog.at_level(logging.DEBUG, logger="uvicorn"), caplog.at_level(logging.DEBUG, logger="ramify"):
        play(["ok"], act)


def test_the_gateway_ends_with_calls_in_flight_and_leaves_no_task():
    async def main() -> None:
        session, sampler = session_of(["ok"])
        sampler.gate.clear()
        async with Gateway() as gateway:
            end = gateway.register(session)
            client = openai.AsyncOpenAI(base_url=end.base_url, api_key=end.api_key, max_retries=0)
            call = asyncio.create_task(client.chat.completions.create(model="x", messages=HI))
            while not sampler.asked:
                await asyncio.sleep(0.002)
        with pytest.raises(openai.APIError):
            await call
        await client.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_port_that_is_taken_is_named():
    async def main() -> None:
        async with Gateway() as gateway:
            port = int(gateway.address.rpartition(":")[2])
            with pytest.raises(PortTaken, match=str(port)):
                await Gateway(port=port).start()

    asyncio.run(main())
