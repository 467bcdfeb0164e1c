"""Qwen-coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`.

Values are plain text. The tool's schema gives their types: a string is kept unchanged, any other value is parsed as
JSON. Without a schema, a value is parsed as JSON unless that gives a string.

A value may contain any of the tags, so a tag closes a block only if the text after it fits. Blocks are found with
`str.find`, each tag once, so that a call is parsed in linear time for any text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ramify.model.render.tool_parsers.base import (
    CallSyntax,
    ParseProblemKind,
    RawToolCall,
    ToolParseError,
    ToolParseResult,
    ToolSchema,
    parse_tagged,
    skip_whitespace,
)
from ramify.model.render.tool_parsers.hermes import CALL_START, CALL_STOP, find_block_end

FUNCTION_START, FUNCTION_STOP = "<function=", "</function>"
PARAMETER_START, PARAMETER_STOP = "<parameter=", "</parameter>"
SYNTAX = CallSyntax(
    (CALL_START, "\n", FUNCTION_START),
    (">\n",),
    (FUNCTION_STOP, "\n", CALL_STOP),
    has_quoted_name=False,
    parameter=(PARAMETER_START, ">\n", f"\n{PARAMETER_STOP}\n"),
)
PYTHON_LITERALS = {"True": True, "False": False, "None": None}


def parse(text: str, tools: Sequence[ToolSchema]) -> ToolParseResult:
    """Parse the calls between tags; all other text is content."""
    closing_tags = ClosingTagFinder(text)

    def parse_block(text: str, start: int) -> tuple[list[RawToolCall], int]:
        call, end = _parse_call(text, start, closing_tags, tools)
        return [call], end

    return parse_tagged(text, CALL_START, parse_block, lambda text, start, error: (error, find_block_end(text, start)))


class NamedBlock(NamedTuple):
    """A block `<tag=name>body</tag>`: its name, its body, and where the block ends."""

    name: str
    body: str
    stop: int


class ClosingTagFinder:
    """Finds the closing tags `</function> </tool_call>` from left to right, each of them once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._last_match: tuple[int, int] | None = (-1, -1)

    def find_after(self, start: int) -> tuple[int, int] | None:
        """Return start and end of the first closing tags at or after `start`, which must not decrease between calls."""
        while self._last_match is not None and self._last_match[0] < start:
            self._last_match = self._find(max(start, self._last_match[1]))
        return self._last_match

    def _find(self, position: int) -> tuple[int, int] | None:
        text = self._text
        while (start := text.find(FUNCTION_STOP, position)) >= 0:
            position = skip_whitespace(text, start + len(FUNCTION_STOP))
            if text.startswith(CALL_STOP, position):
                return start, position + len(CALL_STOP)
        return None


def _parse_call(
    text: str, start: int, closing_tags: ClosingTagFinder, tools: Sequence[ToolSchema]
) -> tuple[RawToolCall, int]:
    block = _parse_function(text, start, closing_tags)
    if block is None:
        closed = text.startswith(CALL_STOP, find_block_end(text, start) - len(CALL_STOP))
        kind = ParseProblemKind.BAD_FORM if closed else ParseProblemKind.UNCLOSED
        raise ToolParseError(kind, "expected <function=name>...</function>")
    if not block.name:
        raise ToolParseError(ParseProblemKind.NO_NAME, "the call has no name")
    types = _parameter_types(block.name, tools)
    arguments: dict[str, Any] = {}
    position = skip_whitespace(block.body, 0)
    while (parameter := _parse_parameter(block.body, position)) is not None:
        value = parameter.body.removeprefix("\n").removesuffix("\n")
        arguments[parameter.name] = _parse_value(value, types.get(parameter.name))
        position = skip_whitespace(block.body, parameter.stop)
    if position < len(block.body):
        excerpt = block.body[position : position + 40].rstrip()
        raise ToolParseError(ParseProblemKind.BAD_ARGUMENTS, f"expected <parameter=name>, found {excerpt!r}")
    return RawToolCall(block.name, json.dumps(arguments, ensure_ascii=False)), block.stop


def _parse_function(text: str, start: int, closing_tags: ClosingTagFinder) -> NamedBlock | None:
    """Return the function block of the call at `start`; it ends where the call ends."""
    opening = _parse_opening_tag(text, skip_whitespace(text, start + len(CALL_START)), FUNCTION_START)
    if opening is None:
        return None
    name, body_start = opening
    close = closing_tags.find_after(body_start)
    return None if close is None else NamedBlock(name, text[body_start : close[0]], close[1])


def _parse_parameter(body: str, start: int) -> NamedBlock | None:
    """Return the parameter block at `start`. It ends at the first closing tag before another parameter or the end."""
    opening = _parse_opening_tag(body, start, PARAMETER_START)
    if opening is None or not opening[0]:
        return None
    name, body_start = opening
    stop = body.find(PARAMETER_STOP, body_start)
    while stop >= 0:
        after = skip_whitespace(body, stop + len(PARAMETER_STOP))
        if after == len(body) or body.startswith(PARAMETER_START, after):
            return NamedBlock(name, body[body_start:stop], after)
        stop = body.find(PARAMETER_STOP, after)
    return None


def _parse_opening_tag(text: str, start: int, tag: str) -> tuple[str, int] | None:
    """Return the name in the opening tag at `start`, which must be on one line, and the end of the tag."""
    if not text.startswith(tag, start):
        return None
    end = text.find(">", start)
    name = text[start + len(tag) : end]
    return None if end < 0 or "\n" in name else (name.strip(), end + 1)


def _parameter_types(name: str, tools: Sequence[ToolSchema]) -> Mapping[str, Any]:
    """Return the declared type of each parameter of a tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters: dict[str, Any] = function.get("parameters") or {}
            properties: dict[str, Any] = parameters.get("properties") or {}
            return {key: schema.get("type") for key, schema in properties.items() if hasattr(schema, "get")}
    return {}


def _parse_value(text: str, declared_type: Any) -> Any:
    if declared_type == "string":
        return text
    if text.strip() in PYTHON_LITERALS:
        return PYTHON_LITERALS[text.strip()]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) and declared_type is None else value
