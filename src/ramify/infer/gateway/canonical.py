"""Canonical forms of messages, which decide whether a conversation continues a recorded one.

Clients change a reply before they send it back: they drop the reasoning, reformat the arguments of calls, turn 1.0 into
1, send text as parts, or strip it. These changes do not make another conversation. So messages are compared by role,
text, tool calls as (id, name, parsed arguments) and tool call id. Reasoning is compared separately, and only if the
client sent it. The text of replies is compared without surrounding whitespace.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from ramify.core.errors import ContextOverflow
from ramify.infer.dialects.chat_format import parse_arguments
from ramify.infer.dialects.model_call import ModelRequest
from ramify.model.render.tokenizer import OFFLOAD_MIN_CHARS
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


# The size of a request, checked before it is parsed and rendered.
#
# Rendering and tokenizing a text takes time in proportion to its length, and parsing needs memory for every value.
# Both are bounded by what can fit the model's context, with a wide margin; the exact length is checked after
# rendering.

MAX_CHARS_PER_TOKEN = 16  # of a whole conversation, on average; English has four
MAX_UNKNOWN_CHARS = 4 * 2**20  # of a conversation with a model whose length is not known


def count_chars(request: ModelRequest) -> int:
    """Return the number of characters of a request that are rendered; tools and schemas count as they are encoded."""
    num_chars = len(request.prefill) + (len(encode_canonical(request.tools)) if request.tools else 0)
    if request.constraint is not None and request.constraint.json_schema is not None:
        num_chars += len(encode_canonical(request.constraint.json_schema))
    for message in request.messages:
        num_chars += len(message.text) + len(message.reasoning or "")
        num_chars += sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return num_chars


def check_num_chars(num_chars: int, context_lengths: Iterable[int | None]) -> None:
    """Raise ContextOverflow if a text fits none of these context lengths in tokens; None is an unknown length."""
    lengths = list(context_lengths)
    max_chars = max(
        MAX_UNKNOWN_CHARS if length is None else max(OFFLOAD_MIN_CHARS, MAX_CHARS_PER_TOKEN * length)
        for length in lengths
    )
    if num_chars > max_chars:
        expected = "unknown" if None in lengths else f"{max(filter(None, lengths))} tokens"
        raise ContextOverflow(
            f"This model's maximum context length is {expected}; the prompt has {num_chars} characters, and at most "
            f"{max_chars} are rendered"
        )
