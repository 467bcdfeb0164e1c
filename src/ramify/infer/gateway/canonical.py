"""Canonical forms of messages, which decide whether a conversation continues a recorded one.

Clients change a reply before they send it back: they drop the reasoning, reformat the arguments of calls, turn 1.0 into
1, send text as parts, or strip it. These changes do not make another conversation. So messages are compared by role,
text, tool calls as (id, name, parsed arguments) and tool call id. Reasoning is compared separately, and only if the
client sent it. The text of replies is compared without surrounding whitespace.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from ramify.infer.dialects.chat_format import parse_arguments
from ramify.trace import MediaPart, Message

_encode = msgspec.msgpack.Encoder(order="sorted").encode


def message_key(message: Message) -> bytes:
    """Return a key that is equal for equivalent messages; reasoning is ignored."""
    text = _content_key(message)
    if isinstance(text, str) and message.role == "assistant":
        text = text.strip()
    if not message.tool_calls and message.tool_call_id is None:
        return _encode((message.role, text))
    calls = [(call.id, call.name, _canonical_arguments(call.arguments)) for call in message.tool_calls]
    return encode_canonical((message.role, text, calls, message.tool_call_id))


def _content_key(message: Message) -> str | list[tuple[str, str]]:
    """Return the text, or texts and images in their order; it does not matter how a text is split into parts."""
    if isinstance(message.content, str) or not any(isinstance(part, MediaPart) for part in message.content):
        return message.text
    pieces: list[tuple[str, str]] = []
    for part in message.content:
        if isinstance(part, MediaPart):
            pieces.append(("image", part.hash))
        elif pieces and pieces[-1][0] == "text":
            pieces[-1] = ("text", pieces[-1][1] + part.text)
        elif part.text:
            pieces.append(("text", part.text))
    return pieces


def has_same_reasoning(recorded: Message, sent: Message) -> bool:
    """Return whether the client sent the reasoning of the recorded message, or none."""
    return not sent.reasoning or sent.reasoning.strip() == (recorded.reasoning or "").strip()


def encode_canonical(value: Any) -> bytes:
    """Encode a plain value; equal values give equal bytes, in any order of their keys."""
    try:
        return _encode(value)
    except OverflowError:  # an integer of more than 64 bits, which a model may write
        return json.dumps(value, sort_keys=True).encode()


def _canonical_arguments(text: str) -> Any:
    """Return the arguments in canonical form, or their text if they are nested too deeply."""
    try:
        return _normalize_numbers(parse_arguments(text))
    except RecursionError:
        return text


def _normalize_numbers(value: Any) -> Any:
    """Return the value with 1 instead of 1.0, because JavaScript does not distinguish them."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _normalize_numbers(item) for name, item in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list):
        return [_normalize_numbers(item) for item in cast(list[Any], value)]
    return value
