"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The object is parsed as JSON before its closing tag is searched for, because an argument may contain the tag.
"""

from __future__ import annotations

from collections.abc import Sequence

from ramify.render.base import ParseProblemKind, ToolSchema
from ramify.render.tool_parsers.base import ToolParseError, ToolParseResult, parse_call, parse_object, skip_whitespace

CALL_START, CALL_STOP = "<tool_call>", "</tool_call>"


def parse(text: str, tools: Sequence[ToolSchema]) -> ToolParseResult:
    """What is said, and the calls between tags."""
    reading = ToolParseResult()
    at = 0
    while (start := text.find(CALL_START, at)) >= 0:
        reading.add_text(text[at:start])
        try:
            found = parse_object(text, skip_whitespace(text, start + len(CALL_START)))
            call = parse_call(found)
            stop = skip_whitespace(text, found.stop)
            if not text.startswith(CALL_STOP, stop):
                raise ToolParseError(ParseProblemKind.UNCLOSED, f"no {CALL_STOP} behind the call")
            reading.add_calls(call)
            at = stop + len(CALL_STOP)
        except ToolParseError as problem:
            if reading.is_at_problem_limit:
                reading.add_last_problem(problem, text[start:])
                return reading
            at = find_block_end(text, start)
            reading.add_problem(
                problem if text.startswith(CALL_STOP, at - len(CALL_STOP)) else _as_unclosed(problem), text[start:at]
            )
    reading.add_text(text[at:])
    return reading


def find_block_end(text: str, start: int) -> int:
    """Return the end of a malformed call: after its closing tag, before the next call, or the end of the text."""
    following = text.find(CALL_START, start + len(CALL_START))
    end = following if following >= 0 else len(text)
    stop = text.find(CALL_STOP, start, end)
    return stop + len(CALL_STOP) if stop >= 0 else end


def _as_unclosed(error: ToolParseError) -> ToolParseError:
    return ToolParseError(ParseProblemKind.UNCLOSED, error.detail)
