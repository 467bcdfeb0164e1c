"""Real SDKs over HTTP, which drop the reasoning and reformat arguments: the conversation is still one branch."""

import json
from typing import Any

import pytest

from tests.support.engine import check_tokens
from tests.support.renderers import renderer
from tests.support.scenario import Scenario

pytestmark = pytest.mark.promise  # exact tokens

SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}, "n": {"type": "number"}}}
CALL = (
    "<think>\nI should look.\n</think>\n\nOne moment."
    '<tool_call>{"name": "look_up", "arguments": {"word":"é b",  "n": 1.0}}</tool_call>'
)
SCRIPT = [CALL, "A fruit."]
RESULT = "apple: a fruit"


def reformatted(arguments: str) -> str:
    """Return the arguments as another program formats them: other whitespace and order, escapes, 1 for 1.0."""
    table = json.loads(arguments)
    return json.dumps({"n": int(table["n"]), "word": table["word"]}, indent=1)


async def converse_with_chat(scenario: Scenario, stream: bool) -> str:
    client = scenario.openai()
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
            completion = await events.get_final_completion()
        assert completion.usage is not None and completion.usage.prompt_tokens > 0
        return completion.choices[0]

    first = await turn()
    assert first.finish_reason == "tool_calls" and first.message.content == "One moment."
    assert first.message.to_dict()["reasoning_content"] == "I should look."
    (call,) = first.message.tool_calls
    function = {"name": call.function.name, "arguments": reformatted(call.function.arguments)}
    message_fields = {"role": "assistant", "content": first.message.content}
    messages += [{**message_fields, "tool_calls": [{"id": call.id, "type": "function", "function": function}]}]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": RESULT}]}]
    return (await turn()).message.content or ""


async def converse_with_responses(scenario: Scenario, stream: bool) -> str:
    client = scenario.openai()
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


async def converse_with_messages(scenario: Scenario, stream: bool) -> str:
    client = scenario.anthropic()
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
@pytest.mark.parametrize("converse", [converse_with_chat, converse_with_responses, converse_with_messages])
async def test_a_tool_conversation_is_one_branch_of_the_engine_tokens(open_scenario, converse, stream):
    async with open_scenario(list(SCRIPT)) as scenario:
        assert await converse(scenario, stream) == "A fruit."
        trace = scenario.trace
        assert len(trace.leaves) == 1 and "forks" not in trace.info
        assert [node.message.role for node in trace.nodes] == ["system", "user", "assistant", "tool", "assistant"]
        assert not [name for name in trace.metrics if name.startswith("render/breaks")]
        check_tokens(trace, scenario.engine)
        calls = [node.call for node in trace.nodes if node.call is not None]
        assert [call.requested_model for call in calls] == ["gpt-x"] * 2 and {call.served_model for call in calls} == {
            "tiny"
        }
        assert [call.finish_reason for call in calls] == ["tool_calls", "stop"]
        assert all(node.is_trainable for node in trace.nodes)
        (prompt, ids, _), (continued, _, _) = scenario.engine.samples
        assert continued[: len(prompt) + len(ids)] == prompt + ids


async def test_all_dialects_give_equal_tokens(open_scenario):
    prompts = []
    for converse in (converse_with_chat, converse_with_responses, converse_with_messages):

        async def check(scenario: Scenario, converse=converse) -> None:
            await converse(scenario, False)
            prompts.append([prompt for prompt, _, _ in scenario.engine.samples])

        async with open_scenario(list(SCRIPT)) as scenario:
            await check(scenario)
    assert prompts[0] == prompts[1] == prompts[2]


async def test_dropped_reasoning_is_recorded_as_the_reason_of_a_fork(open_scenario):
    qwen = renderer("qwen3")
    thought = "<think>\nhm\n</think>\n\n"

    async with open_scenario([thought + "one", thought + "two"], renderer=qwen) as scenario:
        await scenario.chat("a")
        await scenario.chat("a", "one", "b")
        assert scenario.trace.metrics["render/breaks"] == 1
        assert scenario.reasons == ["reasoning_dropped"]
        check_tokens(scenario.trace, scenario.engine)
