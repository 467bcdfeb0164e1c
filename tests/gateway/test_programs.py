"""What agent programs send that plain clients do not: namespaced tools, images of tools, system entries in between."""

import json
from typing import Any

import pytest

from tests.gateway.engine import check_tokens
from tests.gateway.stage import Stage

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
