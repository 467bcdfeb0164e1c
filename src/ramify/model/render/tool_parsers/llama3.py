"""Llama 3: the whole reply is the call, `{"name": ..., "parameters": {...}}`, optionally after `<|python_tag|>`.

Such a call looks like any reply in JSON. So a reply is parsed as a call only as a whole, only if tools were offered,
and only if it has a name.
"""

import re
from collections.abc import Sequence

from ramify.model.render.tool_parsers.base import (
    CallSyntax,
    ParseProblemKind,
    RawJsonObject,
    RawToolCall,
    ToolParseError,
    ToolParseResult,
    ToolSchema,
    expect_object,
    parse_as_text,
    parse_call,
    parse_object,
    skip_whitespace,
)

PYTHON_TAG = "<|python_tag|>"
SYNTAX = CallSyntax(('{"name": ',), (', "parameters": ',), ("}",), separator=("; ",))
CALL_START_RE = re.compile(r'\{\s*"(name|function)"\s*:|\{\s*"type"\s*:\s*"function"')


def parse(text: str, tools: Sequence[ToolSchema]) -> ToolParseResult:
    """Parse the whole reply as calls, or else as text."""
    has_tag = text.lstrip().startswith(PYTHON_TAG)
    start = skip_whitespace(text, text.index(PYTHON_TAG) + len(PYTHON_TAG) if has_tag else 0)
    if not tools or not (has_tag or CALL_START_RE.match(text, start)):
        return parse_as_text(text, tools)
    result = ToolParseResult()
    try:
        result.add_calls(*_parse_calls(text, start))
    except ToolParseError as error:
        result.add_problem(error, text)
    return result


def _parse_calls(text: str, position: int) -> list[RawToolCall]:
    """Parse consecutive calls, separated by `;` or whitespace."""
    calls: list[RawToolCall] = []
    while position < len(text):
        json_object = expect_object(text, position)
        calls.append(parse_call(_unwrap_function(json_object)))
        position = skip_whitespace(text, json_object.stop)
        if text.startswith(";", position):
            position = skip_whitespace(text, position + 1)
    if not calls:
        raise ToolParseError(ParseProblemKind.UNCLOSED, "nothing behind the tag")
    return calls


def _unwrap_function(json_object: RawJsonObject) -> RawJsonObject:
    """Return the inner object of `{"type": "function", "function": {...}}`, or the object itself."""
    inner = json_object.raw_values.get("function", "")
    return parse_object(inner, 0) if inner.startswith("{") else json_object
