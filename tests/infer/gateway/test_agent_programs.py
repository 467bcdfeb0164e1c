"""Requests that only agent programs send: namespaced tools, images of tool results, late system messages."""

import json
from typing import Any

import pytest
from rich.console import Console

from ramify.cli.trace_tree import render_trace_tree
from ramify.trace import decode_trace, encode_trace
from tests.support.engine import TINY, check_tokens
from tests.support.renderers import renderer
from tests.support.scenario import Scenario

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="  # 1 x 1


def prompts(scenario: Scenario) -> list[str]:
    """Return the text of the prompt of each call."""
    return [scenario.engine.renderer.tokenizer.decode(prompt) for prompt, _, _ in scenario.engine.samples]


def check_one_branch(scenario: Scenario) -> None:
    """Check that the conversation is one branch with exactly the tokens of the engine."""
    assert len(scenario.trace.leaves) == 1
    assert "forks" not in scenario.trace.info
    assert not [name for name in scenario.trace.metrics if name.startswith("render/breaks")]
    check_tokens(scenario.trace, scenario.engine)


# -- namespaced tools -------------------------------------------------------------------------------------------------


def tool(name: str, **fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    return {"type": "function", "name": name, "description": f"To {name}.", "parameters": schema, **fields}


TOOLS = [
    tool("list"),
    {"type": "namespace", "name": "mcp__calendar", "description": "Plan events.", "tools": [tool("list"), tool("add")]},
    {"type": "namespace", "name": "notes", "tools": [{"type": "custom", "name": "write", "description": "Free text."}]},
]


def call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_call_of_a_namespaced_tool_has_namespace_and_name(open_scenario, stream: bool):
    async def ask(scenario: Scenario, items: list[Any]) -> list[dict[str, Any]]:
        answer = await scenario.post("/responses", {"model": "m", "input": items, "tools": TOOLS, "stream": stream})
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["output"]
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return events[-1]["response"]["output"]

    script = [
        call_text("mcp__calendar__add", title="tea"),
        call_text("list"),
        call_text("notes__write", input="remember"),
    ]
    async with open_scenario([*script, "done"]) as scenario:
        items: list[Any] = [{"type": "message", "role": "user", "content": "plan"}]
        for result in ("added", "listed", "written"):
            (item,) = await ask(scenario, items)
            items += [item, {"type": item["type"] + "_output", "call_id": item["call_id"], "output": result}]
        (last,) = await ask(scenario, items)
        assert last["content"][0]["text"] == "done"
        calls = [item for item in items if "call_id" in item and "output" not in item]
        assert [(call["type"], call.get("namespace"), call["name"]) for call in calls] == [
            ("function_call", "mcp__calendar", "add"),
            ("function_call", None, "list"),
            ("custom_tool_call", "notes", "write"),
        ]
        assert calls[2]["input"] == "remember"
        assert "namespace" not in calls[1]
        assert "mcp__calendar__add" in prompts(scenario)[0] and "mcp__calendar__list" in prompts(scenario)[0]
        check_one_branch(scenario)


async def test_tools_with_equal_flat_names_are_refused(open_scenario):
    async with open_scenario([]) as scenario:
        tools = [tool("a__b"), {"type": "namespace", "name": "a", "tools": [tool("b")]}]
        answer = await scenario.post("/responses", {"input": "hi", "tools": tools})
        assert answer.status_code == 400
        assert "a__b" in answer.json()["error"]["message"]


# -- images that tools return -----------------------------------------------------------------------------------------


def chat_body() -> tuple[str, dict[str, Any]]:
    tool_call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "seen: "}, image]}
    messages = [{"role": "user", "content": "look"}, {"role": "assistant", "tool_calls": [tool_call]}, result]
    return "/chat/completions", {"messages": messages}


def responses_body() -> tuple[str, dict[str, Any]]:
    tool_call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    parts = [
        {"type": "input_text", "text": "seen: "},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
    ]
    result = {"type": "function_call_output", "call_id": "c1", "output": parts}
    return "/responses", {"input": [{"role": "user", "content": "look"}, tool_call, result]}


def messages_body() -> tuple[str, dict[str, Any]]:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    parts = [{"type": "text", "text": "seen: "}, {"type": "image", "source": source}]
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": parts}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    return "/messages", {"messages": messages, "max_tokens": 64}


@pytest.mark.parametrize("body", [chat_body, responses_body, messages_body])
async def test_an_image_of_a_tool_result_is_described_to_a_text_only_model(open_scenario, body):
    async with open_scenario(["ok"]) as scenario:
        answer = await scenario.post(*body())
        assert answer.status_code == 200, answer.text
        (prompt,) = prompts(scenario)
        assert "seen: [an image: image/png, 1 x 1 pixels, 70 bytes; you cannot see images]" in prompt
        check_one_branch(scenario)


# -- system entries inside the messages -------------------------------------------------------------------------------

TOOL = {"name": "bash", "description": "Run it.", "input_schema": {"type": "object", "properties": {}}}
NOTES = ["Agents: two.", "It is late.", "Two left."]
WITHOUT_TOOLS = ("gemma", "phi-3", "zephyr", "mistral-v1")


@pytest.mark.parametrize("name", ["tiny", *WITHOUT_TOOLS, "qwen2.5", "qwen3", "qwen3-coder", "llama-3.1"])
async def test_late_system_messages_do_not_fork_the_conversation(open_scenario, name: str):
    """Claude Code sends them after the user's message and after tool results."""
    tools = {} if name in WITHOUT_TOOLS else {"tools": [TOOL]}
    system = {} if name in ("gemma", "mistral-v1") else {"system": "You are an agent."}

    async def ask(scenario: Scenario, messages: list[Any]) -> None:
        body = {"model": "m", "max_tokens": 64, "messages": messages, **tools, **system}
        answer = await scenario.post("/messages", body)
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": answer.json()["content"]})

    tool_call = CALLED.get(name, call_text("bash"))
    async with open_scenario(
        [tool_call if tools else "first", "second", "third"], renderer=TINY if name == "tiny" else renderer(name)
    ) as scenario:
        messages: list[Any] = [{"role": "user", "content": "go"}, {"role": "system", "content": NOTES[0]}]
        await ask(scenario, messages)
        calls = [block for block in messages[-1]["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "ran"} for block in calls]
        messages.append({"role": "user", "content": results or "and then?"})
        messages.append({"role": "system", "content": [{"type": "text", "text": NOTES[1]}]})
        await ask(scenario, messages)
        messages += [{"role": "system", "content": NOTES[2]}, {"role": "user", "content": "finish"}]
        await ask(scenario, messages)
        prompt = prompts(scenario)[-1]
        positions = [prompt.index(note) for note in NOTES]
        assert positions == sorted(positions)
        assert [prompt.count(note) for note in NOTES] == [1, 1, 1]
        check_one_branch(scenario)


CALLED = {
    "qwen3-coder": "<tool_call>\n<function=bash>\n</function>\n</tool_call>",
    "llama-3.1": '{"name": "bash", "parameters": {}}',
}


# -- fields without effect, reasoning ----------------------------------------------------------------------------------


async def test_fields_without_effect_are_counted_in_the_trace(open_scenario):
    async with open_scenario(["one", "two", "three", "four", "five"]) as scenario:
        messages = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            body = {"model": "m", "max_tokens": 9, "messages": messages, "thinking": {}, "context_management": {}}
            assert (await scenario.post("/messages?beta=true", body)).status_code == 200
        body = {"input": "hi", "store": False, "include": [], "max_output_tokens": 9, "metadata": {}}
        assert (await scenario.post("/responses", body)).status_code == 200
        body = {"messages": messages, "stream": True, "stream_options": {}, "max_completion_tokens": 9, "metadata": {}}
        assert (await scenario.post("/chat/completions", body)).status_code == 200
        counts = {"thinking": 2, "context_management": 2, "metadata": 2}
        assert scenario.trace.info["ignored_fields"] == counts
        assert (await scenario.post("/messages", {**body, **{f"field-{n}": 1 for n in range(200)}})).status_code == 200
        assert len(scenario.trace.info["ignored_fields"]) == 50


@pytest.mark.parametrize("sent_back", ["whole", "encrypted", "foreign", "dropped"])
async def test_encrypted_reasoning_continues_the_conversation(open_scenario, sent_back: str):
    """Codex asks for it, and sends the items back."""

    async with open_scenario(["<think>a thought</think>hello", "bye"], renderer=renderer("ramify")) as scenario:
        body = {
            "include": ["reasoning.encrypted_content"],
            "store": False,
            "input": [{"role": "user", "content": "hi"}],
        }
        reasoning, message = (await scenario.post("/responses", body)).json()["output"]
        assert reasoning["summary"][0]["text"] == "a thought"
        assert reasoning["encrypted_content"] and "a thought" not in reasoning["encrypted_content"]
        back = {
            "whole": [reasoning],
            "encrypted": [{**reasoning, "summary": []}],
            "foreign": [{**reasoning, "summary": [], "encrypted_content": "gAAAA-not-ours"}],
            "dropped": [],
        }[sent_back]
        body["input"] += [*back, message, {"role": "user", "content": "more"}]
        assert (await scenario.post("/responses", body)).status_code == 200
        check_one_branch(scenario)


# -- refusals ---------------------------------------------------------------------------------------------------------


async def test_refusals_are_recorded_in_the_trace_and_shown(open_scenario):
    def fail(_: str) -> str:
        raise ConnectionResetError

    async with open_scenario(fail) as scenario:
        for _ in range(3):
            assert (await scenario.post("/messages", {"messages": [{"role": "robot"}]})).status_code == 400
        assert (await scenario.post("/chat/completions", b"not json")).status_code == 400
        assert (await scenario.post("/embeddings", {"input": "hi"})).status_code == 404
        assert (
            await scenario.post("/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        ).status_code == 502
        refusals = scenario.trace.info["refusals"]
        assert [(refusal["path"], refusal["status"], refusal["name"], refusal["count"]) for refusal in refusals] == [
            ("/v1/messages", 400, "RequestInvalid", 3),
            ("/v1/chat/completions", 400, "RequestInvalid", 1),
            ("/v1/embeddings", 404, "not_found_error", 1),
            ("/v1/chat/completions", 502, "ProviderError", 1),
        ]
        assert decode_trace(encode_trace(scenario.trace)).info["refusals"] == refusals
        console = Console(width=200, no_color=True)
        with console.capture() as captured:
            console.print(render_trace_tree(scenario.trace))
        text = captured.get()
        assert (
            "400 RequestInvalid: messages.0.role: expected user, assistant or system, found 'robot' (3 times)" in text
        )


async def test_the_number_of_recorded_refusals_is_limited(open_scenario):
    async with open_scenario([]) as scenario:
        for number in range(60):
            await scenario.post("/messages", {"messages": [{"role": f"robot {number}"}]})
        assert len(scenario.trace.info["refusals"]) == 50
