"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]`; newer: `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ramify.render.base import ParseProblemKind, ToolSchema
from ramify.render.tool_parsers.base import (
    RawToolCall,
    ToolParseError,
    ToolParseResult,
    normalize_arguments,
    parse_call,
    parse_object,
    skip_whitespace,
)

CALLS_TAG = "[TOOL_CALLS]"
NAMED_CALL_RE = re.compile(r"\s*([^\s\[\]{}]*?)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]+)\s*)?(?:\[ARGS\])\s*(?=\S)")


def parse(text: str, tools: Sequence[ToolSchema]) -> ToolParseResult:
    """What is said, and the calls behind each tag."""
    reading = ToolParseResult()
    at = 0
    while (start := text.find(CALLS_TAG, at)) >= 0:
        reading.add_text(text[at:start])
        try:
            calls, at = _parse_block(text, start + len(CALLS_TAG))
            reading.add_calls(*calls)
        except ToolParseError as problem:
            if reading.is_at_problem_limit:
                reading.add_last_problem(problem, text[start:])
                return reading
            following = text.find(CALLS_TAG, start + len(CALLS_TAG))
            at = following if following >= 0 else len(text)
            reading.add_problem(problem, text[start:at])
    reading.add_text(text[at:])
    return reading


def _parse_block(text: str, start: int) -> tuple[list[RawToolCall], int]:
    position = skip_whitespace(text, start)
    if text.startswith("[", position) and not text.startswith("[ARGS]", position):
        return _parse_list(text, position)
    match = NAMED_CALL_RE.match(text, position)
    if match is None:
        raise ToolParseError(ParseProblemKind.BAD_FORM, "expected a list of calls, or name[ARGS]{...}")
    if not match[1]:
        raise ToolParseError(ParseProblemKind.NO_NAME, "the call has no name")
    json_object = parse_object(text, match.end())
    return [
        RawToolCall(match[1], normalize_arguments(text[match.end() : json_object.stop]), match[2])
    ], json_object.stop


def _parse_list(text: str, position: int) -> tuple[list[RawToolCall], int]:
    calls: list[RawToolCall] = []
    position = skip_whitespace(text, position + 1)
    if text.startswith("]", position):
        raise ToolParseError(ParseProblemKind.BAD_FORM, "the list of calls is empty")
    while not text.startswith("]", position):
        if position >= len(text):
            raise ToolParseError(ParseProblemKind.UNCLOSED, "the list of calls never ends")
        if text[position] != "{":
            raise ToolParseError(
                ParseProblemKind.BAD_FORM, f"expected an object, found {text[position : position + 40]!r}"
            )
        json_object = parse_object(text, position)
        calls.append(parse_call(json_object))
        position = skip_whitespace(text, json_object.stop)
        position = skip_whitespace(text, position + 1) if text.startswith(",", position) else position
    return calls, position + 1
