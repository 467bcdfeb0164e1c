"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The object is parsed as JSON before its closing tag is searched for, because an argument may contain the tag.
"""

from collections.abc import Sequence

from ramify.model.render.tool_parsers.base import (
    CallSyntax,
    ParseProblemKind,
    RawToolCall,
    ToolParseError,
    ToolParseResult,
    ToolSchema,
    parse_call,
    parse_object,
    parse_tagged,
    skip_whitespace,
)

CALL_START, CALL_STOP = "<tool_call>", "</tool_call>"
SYNTAX = CallSyntax((CALL_START, "\n", '{"name": '), (', "arguments": ',), ("}", "\n", CALL_STOP))
MAX_EXCESS_CHARS = 100  # of the text after a call, in an error message


def parse(text: str, tools: Sequence[ToolSchema]) -> ToolParseResult:
    """Parse the calls between tags; all other text is content."""
    return parse_tagged(text, CALL_START, _parse_block, _recover)


def _parse_block(text: str, start: int) -> tuple[list[RawToolCall], int]:
    json_object = parse_object(text, skip_whitespace(text, start + len(CALL_START)))
    call = parse_call(json_object)
    stop = skip_whitespace(text, json_object.stop)
    if not text.startswith(CALL_STOP, stop):
        end = find_block_end(text, start)
        if text.endswith(CALL_STOP, stop, end):
            excess = text[stop : end - len(CALL_STOP)].rstrip()
            detail = f"text between the end of the JSON and {CALL_STOP}: {excess[:MAX_EXCESS_CHARS]!r}"
            raise ToolParseError(ParseProblemKind.BAD_FORM, detail)
        raise ToolParseError(ParseProblemKind.UNCLOSED, f"no {CALL_STOP} behind the call")
    return [call], stop + len(CALL_STOP)


def _recover(text: str, start: int, error: ToolParseError) -> tuple[ToolParseError, int]:
    end = find_block_end(text, start)
    if text.startswith(CALL_STOP, end - len(CALL_STOP)):
        return error, end
    return ToolParseError(ParseProblemKind.UNCLOSED, error.detail), end


def find_block_end(text: str, start: int) -> int:
    """Return the end of a malformed call: after its closing tag, before the next call, or the end of the text."""
    next_start = text.find(CALL_START, start + len(CALL_START))
    end = next_start if next_start >= 0 else len(text)
    stop = text.find(CALL_STOP, start, end)
    return stop + len(CALL_STOP) if stop >= 0 else end
