"""What agent programs send that plain clients do not: namespaced tools, images of tools, system entries in between."""

import json
from typing import Any

import pytest
from rich.console import Console

from ramify.evals.trace_view import render_trace_tree
from ramify.trace import decode_trace, encode_trace
from tests.gateway.engine import TINY, check_tokens
from tests.gateway.stage import Stage
from tests.render.models import renderer

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="  # 1 x 1


def prompts(stage: Stage) -> list[str]:
    """What the model saw at each call."""
    return [stage.engine.renderer.tokenizer.decode(prompt) for prompt, _, _ in stage.engine.seen]


def unbroken(stage: Stage) -> None:
    """The conversation is one branch, and every token is the engine's own."""
    assert len(stage.trace.leaves) == 1
    assert "forks" not in stage.trace.info
    assert not [name for name in stage.trace.metrics if name.startswith("render/breaks")]
    check_tokens(stage.trace, stage.engine)


# -- namespaced tools -------------------------------------------------------------------------------------------------


def tool(name: str, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    return {"type": "function", "name": name, "description": f"To {name}.", "parameters": schema, **more}


TOOLS = [
    tool("list"),
    {"type": "namespace", "name": "mcp__calendar", "description": "Plan events.", "tools": [tool("list"), tool("add")]},
    {"type": "namespace", "name": "notes", "tools": [{"type": "custom", "name": "write", "description": "Free text."}]},
]


def sampled(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_namespaced_tool_is_called_by_its_namespace_and_its_name(play, stream: bool):
    async def ask(stage: Stage, items: list[Any]) -> list[dict[str, Any]]:
        answer = await stage.post("/responses", {"model": "m", "input": items, "tools": TOOLS, "stream": stream})
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["output"]
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return events[-1]["response"]["output"]

    async def act(stage: Stage) -> None:
        items: list[Any] = [{"type": "message", "role": "user", "content": "plan"}]
        for result in ("added", "listed", "written"):
            (item,) = await ask(stage, items)
            items += [item, {"type": item["type"] + "_output", "call_id": item["call_id"], "output": result}]
        (last,) = await ask(stage, items)
        assert last["content"][0]["text"] == "done"
        calls = [item for item in items if "call_id" in item and "output" not in item]
        assert [(call["type"], call.get("namespace"), call["name"]) for call in calls] == [
            ("function_call", "mcp__calendar", "add"),
            ("function_call", None, "list"),
            ("custom_tool_call", "notes", "write"),
        ]
        assert calls[2]["input"] == "remember"
        assert "namespace" not in calls[1]
        assert "mcp__calendar__add" in prompts(stage)[0] and "mcp__calendar__list" in prompts(stage)[0]
        unbroken(stage)

    script = [sampled("mcp__calendar__add", title="tea"), sampled("list"), sampled("notes__write", input="remember")]
    play([*script, "done"], act)


def test_two_tools_that_would_get_one_name_are_refused(play):
    async def act(stage: Stage) -> None:
        tools = [tool("a__b"), {"type": "namespace", "name": "a", "tools": [tool("b")]}]
        answer = await stage.post("/responses", {"input": "hi", "tools": tools})
        assert answer.status_code == 400
        assert "a__b" in answer.json()["error"]["message"]

    play([], act)


# -- images that tools return -----------------------------------------------------------------------------------------


def chat_body() -> tuple[str, dict[str, Any]]:
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "seen: "}, image]}
    said = [{"role": "user", "content": "look"}, {"role": "assistant", "tool_calls": [called]}, result]
    return "/chat/completions", {"messages": said}


def responses_body() -> tuple[str, dict[str, Any]]:
    called = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    shown = [
        {"type": "input_text", "text": "seen: "},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
    ]
    result = {"type": "function_call_output", "call_id": "c1", "output": shown}
    return "/responses", {"input": [{"role": "user", "content": "look"}, called, result]}


def messages_body() -> tuple[str, dict[str, Any]]:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    shown = [{"type": "text", "text": "seen: "}, {"type": "image", "source": source}]
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": shown}
    said = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    return "/messages", {"messages": said, "max_tokens": 64}


@pytest.mark.parametrize("body", [chat_body, responses_body, messages_body])
def test_an_image_that_a_tool_returns_is_described_to_a_model_without_eyes(play, body):
    async def act(stage: Stage) -> None:
        answer = await stage.post(*body())
        assert answer.status_code == 200, answer.text
        (prompt,) = prompts(stage)
        assert "seen: [an image: image/png, 1 x 1 pixels, 70 bytes; you cannot see images]" in prompt
        unbroken(stage)

    play(["ok"], act)


# -- system entries inside the messages -------------------------------------------------------------------------------

TOOL = {"name": "bash", "description": "Run it.", "input_schema": {"type": "object", "properties": {}}}
NOTES = ["Agents: two.", "It is late.", "Two left."]
WITHOUT_TOOLS = ("gemma", "phi-3", "zephyr", "mistral-v1")


@pytest.mark.parametrize("name", ["tiny", *WITHOUT_TOOLS, "qwen2.5", "qwen3", "qwen3-coder", "llama-3.1"])
def test_system_entries_inside_the_messages_do_not_break_the_conversation(play, name: str):
    """As Claude Code sends them: behind the user's words, and behind the result of a tool."""
    tools = {} if name in WITHOUT_TOOLS else {"tools": [TOOL]}
    system = {} if name in ("gemma", "mistral-v1") else {"system": "You are an agent."}

    async def ask(stage: Stage, messages: list[Any]) -> None:
        body = {"model": "m", "max_tokens": 64, "messages": messages, **tools, **system}
        answer = await stage.post("/messages", body)
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": answer.json()["content"]})

    async def act(stage: Stage) -> None:
        messages: list[Any] = [{"role": "user", "content": "go"}, {"role": "system", "content": NOTES[0]}]
        await ask(stage, messages)
        calls = [block for block in messages[-1]["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "ran"} for block in calls]
        messages.append({"role": "user", "content": results or "and then?"})
        messages.append({"role": "system", "content": [{"type": "text", "text": NOTES[1]}]})
        await ask(stage, messages)
        messages += [{"role": "system", "content": NOTES[2]}, {"role": "user", "content": "finish"}]
        await ask(stage, messages)
        prompt = prompts(stage)[-1]
        places = [prompt.index(note) for note in NOTES]
        assert places == sorted(places)
        assert [prompt.count(note) for note in NOTES] == [1, 1, 1]
        unbroken(stage)

    called = CALLED.get(name, sampled("bash"))
    play([called if tools else "first", "second", "third"], act, renderer=TINY if name == "tiny" else renderer(name))


CALLED = {
    "qwen3-coder": "<tool_call>\n<function=bash>\n</function>\n</tool_call>",
    "llama-3.1": '{"name": "bash", "parameters": {}}',
}


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_the_gateway_refuses_stands_in_the_trace_and_in_show(play):
    async def act(stage: Stage) -> None:
        for _ in range(3):
            assert (await stage.post("/messages", {"messages": [{"role": "robot"}]})).status_code == 400
        assert (await stage.post("/chat/completions", b"not json")).status_code == 400
        assert (await stage.post("/embeddings", {"input": "hi"})).status_code == 404
        assert (
            await stage.post("/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        ).status_code == 502
        refusals = stage.trace.info["refusals"]
        assert [(entry["path"], entry["status"], entry["name"], entry["count"]) for entry in refusals] == [
            ("/v1/messages", 400, "RequestInvalid", 3),
            ("/v1/chat/completions", 400, "RequestInvalid", 1),
            ("/v1/embeddings", 404, "not_found_error", 1),
            ("/v1/chat/completions", 502, "ProviderError", 1),
        ]
        assert decode_trace(encode_trace(stage.trace)).info["refusals"] == refusals
        console = Console(width=200, no_color=True)
        with console.capture() as captured:
            console.print(render_trace_tree(stage.trace))
        text = captured.get()
        assert (
            "400 RequestInvalid: messages.0.role: expected user, assistant or system, found 'robot' (3 times)" in text
        )

    def fail(_: str) -> str:
        raise ConnectionResetError

    play(fail, act, max_retries=0)


def test_a_program_that_is_refused_for_ever_does_not_fill_the_trace(play):
    async def act(stage: Stage) -> None:
        for number in range(60):
            await stage.post("/messages", {"messages": [{"role": f"robot {number}"}]})
        assert len(stage.trace.info["refusals"]) == 50

    play([], act)
