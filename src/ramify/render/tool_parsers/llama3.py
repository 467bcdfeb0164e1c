"""Llama 3: the reply is the call, `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`.

Nothing sets such a call apart from a reply that happens to be JSON. So only a whole reply is taken for one, only where
tools were offered, and only if it has a name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ramify.render.base import ParseProblemKind, ToolSchema
from ramify.render.tool_parsers.base import (
    RawJsonObject,
    RawToolCall,
    ToolParseError,
    ToolParseResult,
    parse_as_text,
    parse_call,
    parse_object,
    skip_whitespace,
)

PYTHON_TAG = "<|python_tag|>"
CALL_START_RE = re.compile(r'\{\s*"(name|function)"\s*:|\{\s*"type"\s*:\s*"function"')


def parse(text: str, tools: Sequence[ToolSchema]) -> ToolParseResult:
    """The whole reply as calls, or as text."""
    tagged = text.lstrip().startswith(PYTHON_TAG)
    start = skip_whitespace(text, text.index(PYTHON_TAG) + len(PYTHON_TAG) if tagged else 0)
    if not tools or not (tagged or CALL_START_RE.match(text, start)):
        return parse_as_text(text, tools)
    reading = ToolParseResult()
    try:
        reading.add_calls(*_parse_calls(text, start))
    except ToolParseError as problem:
        reading.add_problem(problem, text)
    return reading


def _parse_calls(text: str, position: int) -> list[RawToolCall]:
    """Calls in a row, set apart by `;` or space."""
    calls: list[RawToolCall] = []
    while position < len(text):
        if text[position] != "{":
            raise ToolParseError(
                ParseProblemKind.BAD_FORM, f"expected an object, found {text[position : position + 40]!r}"
            )
        found = parse_object(text, position)
        calls.append(parse_call(_unwrap_function(found)))
        position = skip_whitespace(text, found.stop)
        if text.startswith(";", position):
            position = skip_whitespace(text, position + 1)
    if not calls:
        raise ToolParseError(ParseProblemKind.UNCLOSED, "nothing behind the tag")
    return calls


def _unwrap_function(json_object: RawJsonObject) -> RawJsonObject:
    """`{"type": "function", "function": {...}}` is another way to say the inner object."""
    inner = json_object.raw_values.get("function", "")
    return parse_object(inner, 0) if inner.startswith("{") else json_object
