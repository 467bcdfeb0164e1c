"""Messages in the form of OpenAI's Chat Completions: read from clients, written to endpoints, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from ramify.errors import ProviderError
from ramify.gateway.media import media_to_url
from ramify.trace import Media, MediaPart, Message, ToolCall, Usage


def to_openai_messages(messages: Sequence[Message], media: Mapping[str, Media]) -> list[dict[str, Any]]:
    """Messages for a chat endpoint. Reasoning stays here: endpoints do not take it back."""
    return [_to_openai_message(message, media) for message in messages]


def to_openai_tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Tool calls as an assistant message holds them."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def parse_tool_calls(calls: Any) -> tuple[ToolCall, ...]:
    """Tool calls of an assistant message; arguments that came as a table become text."""
    found: list[ToolCall] = []
    for call in calls or ():
        arguments = call["function"].get("arguments") or "{}"
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        found.append(ToolCall(str(call.get("id") or ""), str(call["function"]["name"]), text))
    return tuple(found)


def parse_chat_completion(data: bytes, server: str) -> tuple[Message, str, Usage]:
    """The reply of a chat endpoint, its finish reason and token counts."""
    try:
        answer = msgspec.json.decode(data)
        choice = answer["choices"][0]
        said = choice["message"]
        reasoning = said.get("reasoning_content") or said.get("reasoning")
        message = Message(
            "assistant",
            said.get("content") or "",
            reasoning if isinstance(reasoning, str) else None,
            parse_tool_calls(said.get("tool_calls")),
        )
        counts = answer.get("usage") or {}
        cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        usage = Usage(int(counts.get("prompt_tokens") or 0), int(counts.get("completion_tokens") or 0), int(cached))
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        shown = data[:200].decode("utf-8", "replace")
        raise ProviderError(f"{server} answered something unexpected ({error!r}): {shown}") from error
    return message, finish, usage


def _to_openai_message(message: Message, media: Mapping[str, Media]) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": _to_openai_content(message, media)}
    if message.tool_calls:
        plain["tool_calls"] = to_openai_tool_calls(message.tool_calls)
        plain["content"] = plain["content"] or None
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


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
