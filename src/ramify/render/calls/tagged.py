"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The object is read as JSON before its closing tag is looked for, because an argument may well contain the tag: agents
write programs about agents.
"""

from __future__ import annotations

from collections.abc import Sequence

from ramify.render.calls.reading import Reading, Unreadable, read_call, read_object, skip_space
from ramify.render.conversation import ProblemKind, Tool

START, STOP = "<tool_call>", "</tool_call>"


def read(text: str, tools: Sequence[Tool]) -> Reading:
    """What is said, and the calls between tags."""
    reading = Reading()
    at = 0
    while (start := text.find(START, at)) >= 0:
        reading.say(text[at:start])
        try:
            found = read_object(text, skip_space(text, start + len(START)))
            call = read_call(found)
            stop = skip_space(text, found.stop)
            if not text.startswith(STOP, stop):
                raise Unreadable(ProblemKind.UNCLOSED, f"no {STOP} behind the call")
            reading.call(call)
            at = stop + len(STOP)
        except Unreadable as problem:
            if reading.is_at_limit:
                reading.refuse_rest(problem, text[start:])
                return reading
            at = block_end(text, start)
            reading.refuse(problem if text.startswith(STOP, at - len(STOP)) else _unclosed(problem), text[start:at])
    reading.say(text[at:])
    return reading


def block_end(text: str, start: int) -> int:
    """Where a call that cannot be read ends: behind its closing tag, before the next call, or with the text."""
    following = text.find(START, start + len(START))
    end = following if following >= 0 else len(text)
    stop = text.find(STOP, start, end)
    return stop + len(STOP) if stop >= 0 else end


def _unclosed(problem: Unreadable) -> Unreadable:
    return Unreadable(ProblemKind.UNCLOSED, problem.detail)
