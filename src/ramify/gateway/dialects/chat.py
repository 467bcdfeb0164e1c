"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ramify.errors import RamifyError, RequestInvalid
from ramify.gateway.chatform import read_calls, write_calls
from ramify.gateway.dialects.form import Asked, Reader, code_of, event, function, read_tools, wishes
from ramify.gateway.exchange import Reply, Request
from ramify.render import ToolSchema
from ramify.trace import Usage

ROLES = {"developer": "system", "function": "tool"}


class Chat:
    """Messages in, choices out."""

    ping = b": waiting\n\n"

    def read(self, body: Mapping[str, Any]) -> Asked:
        reader = Reader()
        for number, said in enumerate(body["messages"]):
            role = said.get("role")
            if role not in ("system", "developer", "user", "assistant", "tool", "function"):
                raise RequestInvalid(f"messages.{number}.role: found {role!r}")
            reasoning = said.get("reasoning_content") or said.get("reasoning")
            reader.say(
                ROLES.get(role, role),
                said.get("content"),
                reasoning=reasoning if isinstance(reasoning, str) else None,
                tool_calls=read_calls(said.get("tool_calls")),
                tool_call_id=said.get("tool_call_id"),
            )
        if body.get("n") not in (None, 1):
            raise RequestInvalid("n: only one choice can be asked for at a time; send the request again for another")
        asked = wishes(body, stop="stop", max_tokens="max_tokens")
        asked |= wishes({"max_tokens": body.get("max_completion_tokens")}, max_tokens="max_tokens")
        request = Request(
            messages=tuple(reader.messages),
            tools=read_tools(body.get("tools"), body.get("tool_choice"), _tool),
            model=str(body.get("model") or ""),
            asked=asked,
            media=reader.media,
        )
        options = body.get("stream_options") or {}
        return Asked(request, bool(body.get("stream")), bool(options.get("include_usage")))

    def write(self, asked: Asked, reply: Reply) -> dict[str, Any]:
        said = reply.message
        message: dict[str, Any] = {"role": "assistant", "content": said.text or (None if said.tool_calls else "")}
        if said.reasoning is not None:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = write_calls(said.tool_calls)
        choice = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
        return {**_head(asked, reply, "chat.completion"), "choices": [choice], "usage": _usage(reply.usage)}

    def stream(self, asked: Asked, reply: Reply) -> Iterator[bytes]:
        head = _head(asked, reply, "chat.completion.chunk")
        said = reply.message

        def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
            return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        yield chunk({"role": "assistant", "content": ""})
        if said.reasoning:
            yield chunk({"reasoning_content": said.reasoning})
        if said.text:
            yield chunk({"content": said.text})
        for index, call in enumerate(write_calls(said.tool_calls)):
            arguments = call["function"]["arguments"]
            yield chunk({"tool_calls": [{"index": index, **call, "function": {**call["function"], "arguments": ""}}]})
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
        yield chunk({}, reply.finish)
        if asked.usage:
            yield event({**head, "choices": [], "usage": _usage(reply.usage)})
        yield b"data: [DONE]\n\n"

    def count(self, tokens: int) -> dict[str, Any]:
        return {"object": "chat.completion.input_tokens", "input_tokens": tokens}

    def refusal(self, error: RamifyError) -> dict[str, Any]:
        return {"error": {"message": error.message, "type": error.name, "param": None, "code": code_of(error)}}

    def broken(self, error: RamifyError) -> bytes:
        return event(self.refusal(error))


def _tool(tool: Mapping[str, Any]) -> Sequence[ToolSchema]:
    if tool.get("type", "function") != "function":
        return ()
    told = tool["function"]
    return (function(told["name"], told.get("description"), told.get("parameters")),)


def _head(asked: Asked, reply: Reply, kind: str) -> dict[str, Any]:
    model = asked.request.model
    return {"id": f"chatcmpl-{reply.call}", "object": kind, "created": int(time.time()), "model": model}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
