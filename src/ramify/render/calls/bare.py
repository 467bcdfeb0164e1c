"""Llama 3: the reply is the call, `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`.

Nothing sets such a call apart from a reply that happens to be JSON. So only a whole reply is taken for one, only where
tools were offered, and only if it has a name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ramify.render.calls.reading import (
    Call,
    JsonObject,
    Reading,
    Unreadable,
    nothing,
    read_call,
    read_object,
    skip_space,
)
from ramify.render.conversation import ProblemKind, Tool

PYTHON_TAG = "<|python_tag|>"
BEGINS_LIKE_A_CALL = re.compile(r'\{\s*"(name|function)"\s*:|\{\s*"type"\s*:\s*"function"')


def read(text: str, tools: Sequence[Tool]) -> Reading:
    """The whole reply as calls, or as text."""
    tagged = text.lstrip().startswith(PYTHON_TAG)
    start = skip_space(text, text.index(PYTHON_TAG) + len(PYTHON_TAG) if tagged else 0)
    if not tools or not (tagged or BEGINS_LIKE_A_CALL.match(text, start)):
        return nothing(text, tools)
    reading = Reading()
    try:
        reading.call(*_read_calls(text, start))
    except Unreadable as problem:
        reading.refuse(problem, text)
    return reading


def _read_calls(text: str, at: int) -> list[Call]:
    """Calls in a row, set apart by `;` or space."""
    calls: list[Call] = []
    while at < len(text):
        if text[at] != "{":
            raise Unreadable(ProblemKind.BAD_FORM, f"expected an object, found {text[at : at + 40]!r}")
        found = read_object(text, at)
        calls.append(read_call(_unwrapped(found)))
        at = skip_space(text, found.stop)
        if text.startswith(";", at):
            at = skip_space(text, at + 1)
    if not calls:
        raise Unreadable(ProblemKind.UNCLOSED, "nothing behind the tag")
    return calls


def _unwrapped(found: JsonObject) -> JsonObject:
    """`{"type": "function", "function": {...}}` is another way to say the inner object."""
    inner = found.values.get("function", "")
    return read_object(inner, 0) if inner.startswith("{") else found
