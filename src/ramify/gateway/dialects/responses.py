"""OpenAI's Responses: `POST /v1/responses`.

A conversation is a list of items there: reasoning, text and each tool call of one reply are separate, and become one
message again here. Nothing is stored beyond the session, but `previous_response_id` works within it. A client may put a
tool into a namespace; the model sees it under one name, `NAMESPACE__NAME`, and its calls are answered with both parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import RamifyError, RequestInvalid
from ramify.gateway.canonical import parse_arguments
from ramify.gateway.dialects.base import (
    MessageParser,
    ParsedRequest,
    build_function_tool,
    format_sse,
    get_error_code,
    parse_sampling_overrides,
    parse_tools,
)
from ramify.gateway.model_call import ModelReply, ModelRequest
from ramify.render import ToolSchema
from ramify.trace import ToolCall, Usage

CALL_TYPES = ("function_call", "custom_tool_call")
RESULT_TYPES = ("function_call_output", "custom_tool_call_output")
CUSTOM_TOOL_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ResponsesDialect:
    """Items in, items out."""

    keepalive = b": waiting\n\n"

    def parse_request(self, body: Mapping[str, Any]) -> ParsedRequest:
        reader = _ItemParser()
        earlier = body.get("previous_response_id")
        if body.get("instructions") and not earlier:
            reader.add_message("system", body["instructions"])
        given = body.get("input")
        reader.add_items([{"role": "user", "content": given}] if isinstance(given, str) else given or [])
        tools, namespaced = _flatten_namespaces(body.get("tools") or ())
        request = ModelRequest(
            messages=tuple(reader.messages),
            tools=parse_tools(tools, body.get("tool_choice"), _parse_tool),
            model=str(body.get("model") or ""),
            sampling_overrides=parse_sampling_overrides(body, stop="stop", max_tokens="max_output_tokens"),
            media=reader.media,
        )
        custom = frozenset(tool["name"] for tool in tools if tool.get("type") == "custom")
        call = str(earlier).removeprefix("resp_") if earlier else None
        return ParsedRequest(
            request, bool(body.get("stream")), custom_tools=custom, namespaced_tools=namespaced, previous_call_id=call
        )

    def format_reply(self, parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
        return _build_response(parsed, reply, _to_items(parsed, reply))

    def stream_reply(self, parsed: ParsedRequest, reply: ModelReply) -> Iterator[bytes]:
        number = 0

        def say(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return format_sse({"type": kind, "sequence_number": number - 1, **fields}, kind)

        begun = {
            **_build_response(parsed, reply, []),
            "status": "in_progress",
            "incomplete_details": None,
            "usage": None,
        }
        yield say("response.created", response=begun)
        yield say("response.in_progress", response=begun)
        items = _to_items(parsed, reply)
        for index, item in enumerate(items):
            place = {"output_index": index, "item_id": item["id"]}
            yield say("response.output_item.added", output_index=index, item=_empty_item(item))
            for kind, fields in _item_events(item):
                yield say(kind, **place, **fields)
            yield say("response.output_item.done", output_index=index, item=item)
        whole = _build_response(parsed, reply, items)
        yield say(f"response.{whole['status']}", response=whole)

    def format_token_count(self, num_tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    def format_error(self, error: RamifyError) -> dict[str, Any]:
        return {"error": {"message": error.message, "type": error.name, "param": None, "code": get_error_code(error)}}

    def format_stream_error(self, error: RamifyError) -> bytes:
        fields = {"code": get_error_code(error), "message": error.message, "param": None, "sequence_number": 0}
        return format_sse({"type": "error", **fields}, "error")


class _ItemParser(MessageParser):
    """Reads items; those of one reply are gathered until something else comes."""

    def add_items(self, items: Sequence[Mapping[str, Any]]) -> None:
        reasoning, said, calls = list[str](), list[Any](), list[ToolCall]()

        def finish() -> None:
            if reasoning or said or calls:
                thought = "\n".join(reasoning) or None
                self.add_message("assistant", list(said), reasoning=thought, tool_calls=tuple(calls))
                for gathered in (reasoning, said, calls):
                    gathered.clear()

        for number, item in enumerate(items):
            kind = item.get("type") or "message"
            if kind == "reasoning":
                if said or calls:
                    finish()
                reasoning += [str(part.get("text", "")) for part in item.get("content") or item.get("summary") or ()]
            elif kind == "message" and item.get("role") == "assistant":
                content = item.get("content") or ""
                said += [{"type": "text", "text": content}] if isinstance(content, str) else content
            elif kind in CALL_TYPES:
                calls.append(ToolCall(item["call_id"], _flat_name(item), _item_arguments(item)))
            elif kind in RESULT_TYPES:
                finish()
                self.add_message("tool", item.get("output"), tool_call_id=item["call_id"])
            elif kind == "message":
                finish()
                role = "system" if item.get("role") in ("system", "developer") else "user"
                self.add_message(role, item.get("content"))
            else:
                raise RequestInvalid(f"input.{number}.type: {kind!r} is not known here")
        finish()


def _item_arguments(item: Mapping[str, Any]) -> str:
    if item["type"] == "custom_tool_call":
        return msgspec.json.encode({"input": item.get("input") or ""}).decode()
    return str(item.get("arguments") or "{}")


def _flatten_namespaces(
    tools: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], dict[str, tuple[str, str]]]:
    """Return all tools, those in namespaces under one name each, and namespace and name by that one name."""
    flat: list[Mapping[str, Any]] = []
    namespaced: dict[str, tuple[str, str]] = {}
    for tool in tools:
        if tool.get("type") != "namespace":
            flat.append(tool)
            continue
        for inner in tool.get("tools") or ():
            name = _flat_name({"namespace": tool["name"], "name": inner["name"]})
            namespaced[name] = (tool["name"], inner["name"])
            flat.append({**inner, "name": name})
    names = [tool["name"] for tool in flat if "name" in tool]
    for name in namespaced:
        if names.count(name) > 1:
            raise RequestInvalid(f"tools: two of them are called {name!r} with their namespace; rename one")
    return flat, namespaced


def _flat_name(tool: Mapping[str, Any]) -> str:
    """Return the name by which the model sees a tool, or the tool of a call, that may have a namespace."""
    namespace = tool.get("namespace")
    return f"{namespace}__{tool['name']}" if namespace else tool["name"]


def _parse_tool(tool: Mapping[str, Any]) -> Sequence[ToolSchema]:
    """A function, or a tool of free text as a function of one text; those that only OpenAI's servers run are left."""
    if tool.get("type") == "function":
        return (build_function_tool(tool["name"], tool.get("description"), tool.get("parameters")),)
    if tool.get("type") == "custom":
        return (build_function_tool(tool["name"], tool.get("description"), CUSTOM_TOOL_SCHEMA),)
    return ()


def _build_response(parsed: ParsedRequest, reply: ModelReply, items: list[dict[str, Any]]) -> dict[str, Any]:
    short = reply.finish_reason == "length"
    return {
        "id": f"resp_{reply.call_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if short else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if short else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": parsed.request.model,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": f"resp_{parsed.previous_call_id}" if parsed.previous_call_id else None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "usage": _format_usage(reply.usage),
    }


def _format_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _to_items(parsed: ParsedRequest, reply: ModelReply) -> list[dict[str, Any]]:
    said, items = reply.message, list[dict[str, Any]]()
    if said.reasoning:
        summary = [{"type": "summary_text", "text": said.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{reply.call_id}", "summary": summary})
    if said.text or not said.tool_calls:
        part = {"type": "output_text", "text": said.text, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{reply.call_id}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [part]})
    for number, call in enumerate(said.tool_calls):
        namespace, name = parsed.namespaced_tools.get(call.name, (None, call.name))
        head = {"id": f"fc_{reply.call_id}_{number}", "call_id": call.id, "name": name, "status": "completed"}
        if namespace is not None:
            head["namespace"] = namespace
        if call.name in parsed.custom_tools:
            items.append({"type": "custom_tool_call", **head, "input": _custom_tool_input(call)})
        else:
            items.append({"type": "function_call", **head, "arguments": call.arguments})
    return items


def _custom_tool_input(call: ToolCall) -> str:
    table = parse_arguments(call.arguments)
    return str(table.get("input", "")) if isinstance(table, dict) else call.arguments


def _empty_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item as a stream begins it."""
    empty: dict[str, Any] = {"content": [], "summary": [], "arguments": "", "input": "", "status": "in_progress"}
    return {name: empty.get(name, value) for name, value in item.items()}


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events between an item's beginning and its end."""
    if item["type"] == "message":
        (part,) = item["content"]
        place = {"content_index": 0}
        yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**place, "part": part}
    elif item["type"] == "reasoning":
        (part,) = item["summary"]
        place = {"summary_index": 0}
        yield "response.reasoning_summary_part.added", {**place, "part": {**part, "text": ""}}
        yield "response.reasoning_summary_text.delta", {**place, "delta": part["text"]}
        yield "response.reasoning_summary_text.done", {**place, "text": part["text"]}
        yield "response.reasoning_summary_part.done", {**place, "part": part}
    elif item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
        yield "response.function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
    else:
        yield "response.custom_tool_call_input.delta", {"delta": item["input"]}
        yield "response.custom_tool_call_input.done", {"input": item["input"]}
