"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ramify.errors import RamifyError, RequestInvalid
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
from ramify.gateway.openai_format import parse_tool_calls, to_openai_tool_calls
from ramify.render import ToolSchema
from ramify.trace import Usage

ROLE_ALIASES = {"developer": "system", "function": "tool"}


class ChatCompletionsDialect:
    """Messages in, choices out."""

    keepalive = b": waiting\n\n"

    def parse_request(self, body: Mapping[str, Any]) -> ParsedRequest:
        reader = MessageParser()
        for number, said in enumerate(body["messages"]):
            role = said.get("role")
            if role not in ("system", "developer", "user", "assistant", "tool", "function"):
                raise RequestInvalid(f"messages.{number}.role: found {role!r}")
            reasoning = said.get("reasoning_content") or said.get("reasoning")
            reader.add_message(
                ROLE_ALIASES.get(role, role),
                said.get("content"),
                reasoning=reasoning if isinstance(reasoning, str) else None,
                tool_calls=parse_tool_calls(said.get("tool_calls")),
                tool_call_id=said.get("tool_call_id"),
            )
        if body.get("n") not in (None, 1):
            raise RequestInvalid("n: only one choice can be asked for at a time; send the request again for another")
        asked = parse_sampling_overrides(body, stop="stop", max_tokens="max_tokens")
        asked |= parse_sampling_overrides({"max_tokens": body.get("max_completion_tokens")}, max_tokens="max_tokens")
        request = ModelRequest(
            messages=tuple(reader.messages),
            tools=parse_tools(body.get("tools"), body.get("tool_choice"), _parse_tool),
            model=str(body.get("model") or ""),
            sampling_overrides=asked,
            media=reader.media,
        )
        options = body.get("stream_options") or {}
        return ParsedRequest(request, bool(body.get("stream")), bool(options.get("include_usage")))

    def format_reply(self, parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
        said = reply.message
        message: dict[str, Any] = {"role": "assistant", "content": said.text or (None if said.tool_calls else "")}
        if said.reasoning is not None:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = to_openai_tool_calls(said.tool_calls)
        choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
        return {**_envelope(parsed, reply, "chat.completion"), "choices": [choice], "usage": _format_usage(reply.usage)}

    def stream_reply(self, parsed: ParsedRequest, reply: ModelReply) -> Iterator[bytes]:
        head = _envelope(parsed, reply, "chat.completion.chunk")
        said = reply.message

        def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
            return format_sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        yield chunk({"role": "assistant", "content": ""})
        if said.reasoning:
            yield chunk({"reasoning_content": said.reasoning})
        if said.text:
            yield chunk({"content": said.text})
        for index, call in enumerate(to_openai_tool_calls(said.tool_calls)):
            arguments = call["function"]["arguments"]
            yield chunk({"tool_calls": [{"index": index, **call, "function": {**call["function"], "arguments": ""}}]})
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
        yield chunk({}, reply.finish_reason)
        if parsed.include_usage:
            yield format_sse({**head, "choices": [], "usage": _format_usage(reply.usage)})
        yield b"data: [DONE]\n\n"

    def format_token_count(self, num_tokens: int) -> dict[str, Any]:
        return {"object": "chat.completion.input_tokens", "input_tokens": num_tokens}

    def format_error(self, error: RamifyError) -> dict[str, Any]:
        return {"error": {"message": error.message, "type": error.name, "param": None, "code": get_error_code(error)}}

    def format_stream_error(self, error: RamifyError) -> bytes:
        return format_sse(self.format_error(error))


def _parse_tool(tool: Mapping[str, Any]) -> Sequence[ToolSchema]:
    if tool.get("type", "function") != "function":
        return ()
    told = tool["function"]
    return (build_function_tool(told["name"], told.get("description"), told.get("parameters")),)


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
