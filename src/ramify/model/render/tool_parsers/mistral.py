"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]`; newer: `[TOOL_CALLS]name[ARGS]{...}`."""

import re
from collections.abc import Sequence

from ramify.model.render.tool_parsers.base import (
    CallSyntax,
    ParseProblemKind,
    RawToolCall,
    ToolParseError,
    ToolParseResult,
    ToolSchema,
    expect_object,
    normalize_arguments,
    parse_call,
    parse_object,
    parse_tagged,
    skip_whitespace,
)

CALLS_TAG, ARGUMENTS_TAG = "[TOOL_CALLS]", "[ARGS]"
LIST_SYNTAX = CallSyntax(
    ('{"name": ',), (', "arguments": ',), ("}",), start=(CALLS_TAG, " ["), separator=(", ",), stop=("]",)
)
NAMED_SYNTAX = CallSyntax((CALLS_TAG,), (ARGUMENTS_TAG,), (), separator=(), has_quoted_name=False)
NAMED_CALL_RE = re.compile(r"\s*([^\s\[\]{}]*?)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]+)\s*)?(?:\[ARGS\])\s*(?=\S)")


def parse(text: str, tools: Sequence[ToolSchema]) -> ToolParseResult:
    """Parse the calls after each tag; all other text is content."""
    return parse_tagged(text, CALLS_TAG, _parse_block, _recover)


def _recover(text: str, start: int, error: ToolParseError) -> tuple[ToolParseError, int]:
    next_start = text.find(CALLS_TAG, start + len(CALLS_TAG))
    return error, next_start if next_start >= 0 else len(text)


def _parse_block(text: str, start: int) -> tuple[list[RawToolCall], int]:
    position = skip_whitespace(text, start + len(CALLS_TAG))
    if text.startswith("[", position) and not text.startswith(ARGUMENTS_TAG, position):
        return _parse_list(text, position)
    match = NAMED_CALL_RE.match(text, position)
    if match is None:
        raise ToolParseError(ParseProblemKind.BAD_FORM, "expected a list of calls, or name[ARGS]{...}")
    if not match[1]:
        raise ToolParseError(ParseProblemKind.NO_NAME, "the call has no name")
    stop = parse_object(text, match.end()).stop
    return [RawToolCall(match[1], normalize_arguments(text[match.end() : stop]), match[2])], stop


def _parse_list(text: str, position: int) -> tuple[list[RawToolCall], int]:
    calls: list[RawToolCall] = []
    position = skip_whitespace(text, position + 1)
    if text.startswith("]", position):
        raise ToolParseError(ParseProblemKind.BAD_FORM, "the list of calls is empty")
    while not text.startswith("]", position):
        if position >= len(text):
            raise ToolParseError(ParseProblemKind.UNCLOSED, "the list of calls never ends")
        json_object = expect_object(text, position)
        calls.append(parse_call(json_object))
        position = skip_whitespace(text, json_object.stop)
        position = skip_whitespace(text, position + 1) if text.startswith(",", position) else position
    return calls, position + 1
