"""Real clients over HTTP: each drops the reasoning, prints the arguments its own way, and is recorded as one branch."""

import json
from typing import Any

import pytest

from tests.gateway.engine import check_tokens
from tests.gateway.stage import Stage
from tests.render.models import renderer

SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}, "n": {"type": "number"}}}
CALL = (
    "<think>\nI should look.\n</think>\n\nOne moment."
    '<tool_call>{"name": "look_up", "arguments": {"word":"é b",  "n": 1.0}}</tool_call>'
)
SCRIPT = [CALL, "A fruit."]
RESULT = "apple: a fruit"


def reformatted(arguments: str) -> str:
    """The same arguments as another program prints them: other spaces and order, 1 for 1.0, escapes."""
    table = json.loads(arguments)
    return json.dumps({"n": int(table["n"]), "word": table["word"]}, indent=1)


async def by_chat(stage: Stage, stream: bool) -> str:
    client = stage.openai()
    tools: Any = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]

    async def turn():
        if not stream:
            answer = await client.chat.completions.create(model="gpt-x", messages=messages, tools=tools)
            assert answer.usage is not None and answer.usage.completion_tokens > 0
            return answer.choices[0]
        async with client.chat.completions.stream(
            model="gpt-x", messages=messages, tools=tools, stream_options={"include_usage": True}
        ) as events:
            async for _ in events:
                pass
            whole = await events.get_final_completion()
        assert whole.usage is not None and whole.usage.prompt_tokens > 0
        return whole.choices[0]

    first = await turn()
    assert first.finish_reason == "tool_calls" and first.message.content == "One moment."
    assert first.message.to_dict()["reasoning_content"] == "I should look."
    (call,) = first.message.tool_calls
    function = {"name": call.function.name, "arguments": reformatted(call.function.arguments)}
    said = {"role": "assistant", "content": first.message.content}
    messages += [{**said, "tool_calls": [{"id": call.id, "type": "function", "function": function}]}]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": RESULT}]}]
    return (await turn()).message.content or ""


async def by_responses(stage: Stage, stream: bool) -> str:
    client = stage.openai()
    tools: Any = [{"type": "function", "name": "look_up", "description": "d", "parameters": SCHEMA, "strict": False}]
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}]}]
    options: Any = {"model": "gpt-x", "instructions": "Be brief.", "tools": tools, "store": False}

    async def turn():
        if not stream:
            return await client.responses.create(input=items, **options)
        async with client.responses.stream(input=items, **options) as events:
            kinds = [event.type async for event in events]
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            return await events.get_final_response()

    first = await turn()
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output[0].summary[0].text == "I should look."
    assert first.output_text == "One moment." and first.usage.output_tokens > 0
    call = first.output[-1]
    items += [{"role": "assistant", "content": first.output_text}]
    items += [
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": reformatted(call.arguments)}
    ]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    return (await turn()).output_text


async def by_messages(stage: Stage, stream: bool) -> str:
    client = stage.anthropic()
    tools: Any = [
        {"name": "look_up", "description": "d", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    messages: list[Any] = [{"role": "user", "content": "What is it?"}]
    options: Any = {
        "model": "gpt-x",
        "max_tokens": 500,
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": tools,
    }

    async def turn():
        if not stream:
            return await client.messages.create(messages=messages, **options)
        async with client.messages.stream(messages=messages, **options) as events:
            return await events.get_final_message()

    first = await turn()
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[0].thinking == "I should look."
    call = first.content[-1]
    assert call.input == {"word": "é b", "n": 1.0} and first.usage.output_tokens > 0
    use = {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": json.loads(reformatted(json.dumps(call.input))),
    }
    messages += [{"role": "assistant", "content": [{"type": "text", "text": first.content[1].text}, use]}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": RESULT}]}
    messages += [{"role": "user", "content": [result]}]
    last = await turn()
    assert last.stop_reason == "end_turn"
    return last.content[0].text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("converse", [by_chat, by_responses, by_messages])
def test_a_tool_conversation_is_one_branch_of_the_engines_own_tokens(play, converse, stream):
    async def act(stage: Stage) -> None:
        assert await converse(stage, stream) == "A fruit."
        trace = stage.trace
        assert len(trace.leaves) == 1 and "forks" not in trace.info
        assert [node.message.role for node in trace.nodes] == ["system", "user", "assistant", "tool", "assistant"]
        assert not [name for name in trace.metrics if name.startswith("render/breaks")]
        check_tokens(trace, stage.engine)
        calls = [node.call for node in trace.nodes if node.call is not None]
        assert [call.requested_model for call in calls] == ["gpt-x"] * 2 and {call.served_model for call in calls} == {
            "tiny"
        }
        assert [call.finish_reason for call in calls] == ["tool_calls", "stop"]
        assert all(node.is_trainable for node in trace.nodes)
        (prompt, ids, _), (continued, _, _) = stage.engine.seen
        assert continued[: len(prompt) + len(ids)] == prompt + ids

    play(list(SCRIPT), act)


def test_three_dialects_of_one_conversation_give_equal_tokens(play):
    prompts = []
    for converse in (by_chat, by_responses, by_messages):

        async def act(stage: Stage, converse=converse) -> None:
            await converse(stage, False)
            prompts.append([prompt for prompt, _, _ in stage.engine.seen])

        play(list(SCRIPT), act)
    assert prompts[0] == prompts[1] == prompts[2]


def test_reasoning_that_the_template_drops_is_a_break_with_its_reason(play):
    qwen = renderer("qwen3")
    thought = "<think>\nhm\n</think>\n\n"

    async def act(stage: Stage) -> None:
        await stage.chat("a")
        await stage.chat("a", "one", "b")
        assert stage.trace.metrics["render/breaks"] == 1
        assert stage.reasons == ["reasoning_dropped"]
        check_tokens(stage.trace, stage.engine)

    play([thought + "one", thought + "two"], act, renderer=qwen)
