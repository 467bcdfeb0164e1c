"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]`, later `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ramify.render.calls.reading import Call, Reading, Unreadable, arguments_text, read_call, read_object, skip_space
from ramify.render.conversation import ProblemKind, Tool

START = "[TOOL_CALLS]"
NAMED = re.compile(r"\s*([^\s\[\]{}]*?)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]+)\s*)?(?:\[ARGS\])\s*(?=\S)")


def read(text: str, tools: Sequence[Tool]) -> Reading:
    """What is said, and the calls behind each tag."""
    reading = Reading()
    at = 0
    while (start := text.find(START, at)) >= 0:
        reading.say(text[at:start])
        try:
            calls, at = _read_block(text, start + len(START))
            reading.call(*calls)
        except Unreadable as problem:
            if reading.is_at_limit:
                reading.refuse_rest(problem, text[start:])
                return reading
            following = text.find(START, start + len(START))
            at = following if following >= 0 else len(text)
            reading.refuse(problem, text[start:at])
    reading.say(text[at:])
    return reading


def _read_block(text: str, start: int) -> tuple[list[Call], int]:
    at = skip_space(text, start)
    if text.startswith("[", at) and not text.startswith("[ARGS]", at):
        return _read_list(text, at)
    named = NAMED.match(text, at)
    if named is None:
        raise Unreadable(ProblemKind.BAD_FORM, "expected a list of calls, or name[ARGS]{...}")
    if not named[1]:
        raise Unreadable(ProblemKind.NO_NAME, "the call has no name")
    found = read_object(text, named.end())
    return [Call(named[1], arguments_text(text[named.end() : found.stop]), named[2])], found.stop


def _read_list(text: str, at: int) -> tuple[list[Call], int]:
    calls: list[Call] = []
    at = skip_space(text, at + 1)
    if text.startswith("]", at):
        raise Unreadable(ProblemKind.BAD_FORM, "the list of calls is empty")
    while not text.startswith("]", at):
        if at >= len(text):
            raise Unreadable(ProblemKind.UNCLOSED, "the list of calls never ends")
        if text[at] != "{":
            raise Unreadable(ProblemKind.BAD_FORM, f"expected an object, found {text[at : at + 40]!r}")
        found = read_object(text, at)
        calls.append(read_call(found))
        at = skip_space(text, found.stop)
        at = skip_space(text, at + 1) if text.startswith(",", at) else at
    return calls, at + 1
