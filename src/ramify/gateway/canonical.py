"""When do two messages say the same? What decides whether a conversation continues one that is known.

Clients take a reply apart and put it together again: they drop the reasoning, print the arguments of a call with other
spaces and in another order, turn 1.0 into 1, send text as parts, trim it. None of that is another conversation. So
messages are compared by role, text, tool calls as (id, name, parsed arguments) and tool call id; reasoning is compared
apart, and only if the client sent it. What the policy said is compared without the space around it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from ramify.trace import MediaPart, Message

_encode = msgspec.msgpack.Encoder(order="sorted").encode


def message_key(message: Message) -> bytes:
    """Equal for messages that say the same, reasoning left aside."""
    text = message.content
    if not isinstance(text, str):
        media = [part.hash for part in text if isinstance(part, MediaPart)]
        text = [message.text, *media] if media else message.text
    if isinstance(text, str) and message.role == "assistant":
        text = text.strip()
    if not message.tool_calls and message.tool_call_id is None:
        return _encode((message.role, text))
    calls = [(call.id, call.name, _canonical_arguments(call.arguments)) for call in message.tool_calls]
    return encode_canonical((message.role, text, calls, message.tool_call_id))


def has_same_reasoning(recorded: Message, sent: Message) -> bool:
    """Whether the client sent this message's reasoning, or none."""
    return not sent.reasoning or sent.reasoning.strip() == (recorded.reasoning or "").strip()


def encode_canonical(value: Any) -> bytes:
    """Equal for equal plain values, in whatever order their keys are."""
    try:
        return _encode(value)
    except OverflowError:  # a number of more than 64 bits: nothing keeps a model from writing one
        return json.dumps(value, sort_keys=True).encode()


def parse_arguments(text: str) -> Any:
    """The parsed arguments of a call, or the text itself if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _canonical_arguments(text: str) -> Any:
    """The arguments as they are compared; those nested too deep to be looked through are their text."""
    try:
        return _normalize_numbers(parse_arguments(text))
    except RecursionError:
        return text


def _normalize_numbers(value: Any) -> Any:
    """The value with 1 for 1.0: JavaScript knows no difference."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _normalize_numbers(entry) for name, entry in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list):
        return [_normalize_numbers(entry) for entry in cast(list[Any], value)]
    return value
