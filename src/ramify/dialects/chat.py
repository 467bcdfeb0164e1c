"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ramify.dialects.base import (
    Dialect,
    MessageParser,
    ParsedRequest,
    build_function_tool,
    format_sse,
)
from ramify.dialects.model_call import ModelReply
from ramify.dialects.openai_format import parse_tool_calls, to_openai_tool_calls
from ramify.errors import RequestInvalid
from ramify.render import ToolSchema
from ramify.trace import Usage

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ROLE_ALIASES = {"developer": "system", "function": "tool"}


class ChatCompletionsDialect(Dialect):
    """The dialect of OpenAI's Chat Completions API."""

    def parse_request(self, body: Mapping[str, Any]) -> ParsedRequest:
        parser = MessageParser()
        for index, message in enumerate(body["messages"]):
            role = message.get("role")
            if role not in ROLES:
                raise RequestInvalid(f"messages.{index}.role: expected one of {', '.join(ROLES)}, found {role!r}")
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            parser.add_message(
                ROLE_ALIASES.get(role, role),
                message.get("content"),
                reasoning=reasoning if isinstance(reasoning, str) else None,
                tool_calls=parse_tool_calls(message.get("tool_calls")),
                tool_call_id=message.get("tool_call_id"),
            )
        if body.get("n") not in (None, 1):
            raise RequestInvalid("n: expected 1; send the request again for another choice")
        has_new_limit = body.get("max_completion_tokens") is not None
        max_tokens = "max_completion_tokens" if has_new_limit else "max_tokens"
        request = parser.build_request(body, body.get("tools"), _parse_tool, stop="stop", max_tokens=max_tokens)
        options = body.get("stream_options") or {}
        return ParsedRequest(request, bool(body.get("stream")), bool(options.get("include_usage")))

    def format_reply(self, parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
        message = reply.message
        message_dict: dict[str, Any] = {
            "role": "assistant",
            "content": message.text or (None if message.tool_calls else ""),
        }
        if message.reasoning is not None:
            message_dict["reasoning_content"] = message.reasoning
        if message.tool_calls:
            message_dict["tool_calls"] = to_openai_tool_calls(message.tool_calls)
        choice = {"index": 0, "message": message_dict, "finish_reason": reply.finish_reason, "logprobs": None}
        return {**_envelope(parsed, reply, "chat.completion"), "choices": [choice], "usage": _format_usage(reply.usage)}

    def stream_reply(self, parsed: ParsedRequest, reply: ModelReply) -> Iterator[bytes]:
        envelope = _envelope(parsed, reply, "chat.completion.chunk")
        message = reply.message

        def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
            return format_sse({**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})

        yield chunk({"role": "assistant", "content": ""})
        if message.reasoning:
            yield chunk({"reasoning_content": message.reasoning})
        if message.text:
            yield chunk({"content": message.text})
        for index, call in enumerate(to_openai_tool_calls(message.tool_calls)):
            arguments = call["function"]["arguments"]
            yield chunk({"tool_calls": [{"index": index, **call, "function": {**call["function"], "arguments": ""}}]})
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
        yield chunk({}, reply.finish_reason)
        if parsed.include_usage:
            yield format_sse({**envelope, "choices": [], "usage": _format_usage(reply.usage)})
        yield b"data: [DONE]\n\n"

    def format_token_count(self, num_tokens: int) -> dict[str, Any]:
        return {"object": "chat.completion.input_tokens", "input_tokens": num_tokens}


def _parse_tool(tool: Mapping[str, Any]) -> ToolSchema | None:
    if tool.get("type", "function") != "function":
        return None
    function = tool["function"]
    return build_function_tool(function["name"], function.get("description"), function.get("parameters"))


def _envelope(parsed: ParsedRequest, reply: ModelReply, object_type: str) -> dict[str, Any]:
    model = parsed.request.model
    return {"id": f"chatcmpl-{reply.call_id}", "object": object_type, "created": int(time.time()), "model": model}


def _format_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
