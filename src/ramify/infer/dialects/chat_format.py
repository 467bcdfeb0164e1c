"""The format of OpenAI's Chat Completions: messages, tool calls, tools and token counts, in both directions."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.core.errors import ProviderError, RequestInvalid
from ramify.infer.dialects.media import media_to_url
from ramify.infer.dialects.message_parser import MessageParser, build_function_tool
from ramify.model.render import ToolSchema
from ramify.trace import Media, MediaPart, Message, ToolCall, Usage

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ROLE_ALIASES = {"developer": "system", "function": "tool"}
CONTINUE_FIELDS = ("continue_final_message", "add_generation_prompt")
UNSUPPORTED_FIELDS: dict[str, Any] = {
    "allowed_token_ids": [],
    "bad_words": [],
    "logits_processors": [],
    "use_beam_search": False,
    "best_of": 1,
    "functions": [],
}
"""Fields that would change the reply and that nothing here implements, with the value at which they have no effect."""
UNSUPPORTED_ADVICE = {"functions": "send them as tools", "best_of": "send n", "bad_words": "send logit_bias"}

# -- requests ----------------------------------------------------------------------------------------------------------


def check_supported(body: Mapping[str, Any]) -> None:
    """Raise RequestInvalid if a field of `UNSUPPORTED_FIELDS` is set."""
    for name, neutral in UNSUPPORTED_FIELDS.items():
        if (value := body.get(name)) is not None and value != neutral:
            advice = UNSUPPORTED_ADVICE.get(name, "leave it out")
            raise RequestInvalid(f"{name}: not supported, found {value!r:.80}; {advice}")


def continues_final_message(body: Mapping[str, Any]) -> bool:
    """Return whether the reply continues the last message, as vLLM's `continue_final_message` asks for.

    Raises RequestInvalid if `add_generation_prompt` asks for something else.
    """
    continues, adds_prompt = (body.get(name) for name in CONTINUE_FIELDS)
    if adds_prompt not in (None, not continues):
        expected = "false with continue_final_message, else true"
        raise RequestInvalid(f"add_generation_prompt: expected {expected}, found {adds_prompt!r}")
    return bool(continues)


def parse_messages(messages: Iterable[Mapping[str, Any]]) -> MessageParser:
    """Parse the messages of a request. Raises RequestInvalid for an unknown role."""
    parser = MessageParser()
    open_calls: dict[str, str] = {}  # ids of the older `function_call` without a result, by function
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise RequestInvalid(f"messages.{index}.role: expected one of {', '.join(ROLES)}, got {role!r}")
        calls, call_id = message.get("tool_calls"), message.get("tool_call_id")
        if not calls and (function := message.get("function_call")):
            calls = [{"id": f"function_{index}", "function": function}]
            open_calls[str(function["name"])] = f"function_{index}"
        if role == "function" and call_id is None:
            call_id = open_calls.pop(str(message.get("name")), None)
        parser.add_message(
            ROLE_ALIASES.get(role, role),
            message.get("content"),
            reasoning=_parse_reasoning(message),
            tool_calls=parse_tool_calls(calls),
            tool_call_id=call_id,
        )
    return parser


def parse_tool(tool: Mapping[str, Any]) -> ToolSchema | None:
    """Parse an entry of `tools`; None if it is not a function."""
    if tool.get("type", "function") != "function":
        return None
    function = tool["function"]
    return build_function_tool(function["name"], function.get("description"), function.get("parameters"))


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


def _parse_reasoning(message: Mapping[str, Any]) -> str | None:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return reasoning if isinstance(reasoning, str) else None


# -- responses ---------------------------------------------------------------------------------------------------------


def format_envelope(response_id: str, object_type: str, model: str) -> dict[str, Any]:
    """Format the fields with which a response, or an event of a stream, begins."""
    return {"id": response_id, "object": object_type, "created": int(time.time()), "model": model}


def format_usage(usage: Usage) -> dict[str, Any]:
    """Format the `usage` field."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def format_message(
    message: Message, media: Mapping[str, Media] | None = None, *, with_reasoning: bool = True
) -> dict[str, Any]:
    """Format a message; the content is null if there are only tool calls. `media` has its images, by hash."""
    content = _format_content(message, media or {})
    fields: dict[str, Any] = {"role": message.role, "content": None if message.tool_calls and not content else content}
    if with_reasoning and message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = format_tool_calls(message.tool_calls)
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def format_tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Format the tool calls of an assistant message."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def _format_content(message: Message, media: Mapping[str, Media]) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str) or not any(isinstance(part, MediaPart) for part in message.content):
        return message.text
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if isinstance(part, MediaPart):
            parts.append({"type": "image_url", "image_url": {"url": media_to_url(media[part.hash])}})
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


# -- the other side: responses of a chat endpoint ----------------------------------------------------------------------


def parse_chat_completion(data: bytes, server: str) -> tuple[Message, str, Usage]:
    """Parse the response of a chat endpoint: message, finish reason and token usage. Raises ProviderError."""
    try:
        completion = msgspec.json.decode(data)
        choice = completion["choices"][0]
        reply, token_counts = choice["message"], _get_object(completion, "usage")
        calls = parse_tool_calls(reply.get("tool_calls"))
        message = Message("assistant", reply.get("content") or "", _parse_reasoning(reply), calls)
        cached = _get_object(token_counts, "prompt_tokens_details").get("cached_tokens")
        counts = [token_counts.get("prompt_tokens"), token_counts.get("completion_tokens"), cached]
        usage = Usage(*(int(count or 0) for count in counts))
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        excerpt = data[:200].decode("utf-8", "replace")
        raise ProviderError(f"{server} sent an unexpected response ({error!r}): {excerpt}") from error
    return message, finish, usage


def _get_object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object in a JSON object; an empty one if it is null or missing."""
    return fields.get(name) or {}
