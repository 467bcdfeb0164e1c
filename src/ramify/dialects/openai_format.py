"""Conversion of messages to and from the format of OpenAI's Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from ramify.dialects.media import media_to_url
from ramify.errors import ProviderError
from ramify.trace import Media, MediaPart, Message, ToolCall, Usage


def to_openai_messages(messages: Sequence[Message], media: Mapping[str, Media]) -> list[dict[str, Any]]:
    """Convert messages for a chat endpoint. Reasoning is left out, because endpoints do not accept it."""
    return [_to_openai_message(message, media) for message in messages]


def to_openai_tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Convert tool calls to those of an assistant message."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def parse_tool_calls(calls: Any) -> tuple[ToolCall, ...]:
    """Parse the tool calls of an assistant message; arguments that are an object become JSON text."""
    parsed: list[ToolCall] = []
    for call in calls or ():
        arguments = call["function"].get("arguments") or "{}"
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        parsed.append(ToolCall(str(call.get("id") or ""), str(call["function"]["name"]), text))
    return tuple(parsed)


def parse_arguments(text: str) -> Any:
    """Return the parsed arguments of a call, or the text itself if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def parse_chat_completion(data: bytes, server: str) -> tuple[Message, str, Usage]:
    """Parse the response of a chat endpoint: message, finish reason and token usage."""
    try:
        completion = msgspec.json.decode(data)
        choice = completion["choices"][0]
        reply = choice["message"]
        reasoning = reply.get("reasoning_content") or reply.get("reasoning")
        message = Message(
            "assistant",
            reply.get("content") or "",
            reasoning if isinstance(reasoning, str) else None,
            parse_tool_calls(reply.get("tool_calls")),
        )
        token_counts = completion.get("usage") or {}
        cached = (token_counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        usage = Usage(
            int(token_counts.get("prompt_tokens") or 0), int(token_counts.get("completion_tokens") or 0), int(cached)
        )
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        excerpt = data[:200].decode("utf-8", "replace")
        raise ProviderError(f"{server} sent an unexpected response ({error!r}): {excerpt}") from error
    return message, finish, usage


def _to_openai_message(message: Message, media: Mapping[str, Media]) -> dict[str, Any]:
    message_dict: dict[str, Any] = {"role": message.role, "content": _to_openai_content(message, media)}
    if message.tool_calls:
        message_dict["tool_calls"] = to_openai_tool_calls(message.tool_calls)
        message_dict["content"] = message_dict["content"] or None
    if message.tool_call_id is not None:
        message_dict["tool_call_id"] = message.tool_call_id
    return message_dict


def _to_openai_content(message: Message, media: Mapping[str, Media]) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str) or not any(isinstance(part, MediaPart) for part in message.content):
        return message.text
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if isinstance(part, MediaPart):
            parts.append({"type": "image_url", "image_url": {"url": media_to_url(media[part.hash])}})
        else:
            parts.append({"type": "text", "text": cast(Any, part).text})
    return parts
