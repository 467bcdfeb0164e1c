"""Qwen-coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`.

Values are bare text. A tool's schema says what they mean: text stays as it is, anything else is read as JSON. Without a
schema a value that is JSON but not a text is taken as such.

A value may contain any of the tags, so a tag only closes a block if the text after it fits. Blocks are found with
`str.find`, each tag once, so that a call is read in linear time whatever the model has written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ramify.render.calls.reading import Call, Reading, Unreadable, skip_space
from ramify.render.calls.tagged import START, STOP, block_end
from ramify.render.conversation import ProblemKind, Tool

FUNCTION, FUNCTION_STOP = "<function=", "</function>"
PARAMETER, PARAMETER_STOP = "<parameter=", "</parameter>"
LITERALS = {"True": True, "False": False, "None": None}


def read(text: str, tools: Sequence[Tool]) -> Reading:
    """What is said, and the calls between tags."""
    reading, closes = Reading(), ClosingTags(text)
    at = 0
    while (start := text.find(START, at)) >= 0:
        reading.say(text[at:start])
        try:
            call, at = _read_call(text, start, closes, tools)
            reading.call(call)
        except Unreadable as problem:
            if reading.is_at_limit:
                reading.refuse_rest(problem, text[start:])
                return reading
            at = block_end(text, start)
            reading.refuse(problem, text[start:at])
    reading.say(text[at:])
    return reading


class NamedBlock(NamedTuple):
    """A block `<tag=name>body</tag>`: its name, its body, and where the block ends."""

    name: str
    body: str
    stop: int


class ClosingTags:
    """Finds the places `</function> </tool_call>` where calls end, from left to right, each of them once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._latest: tuple[int, int] | None = (-1, -1)

    def first_after(self, at: int) -> tuple[int, int] | None:
        """Return start and end of the first closing tags at or after `at`, which must not decrease between calls."""
        while self._latest is not None and self._latest[0] < at:
            self._latest = self._find(max(at, self._latest[1]))
        return self._latest

    def _find(self, at: int) -> tuple[int, int] | None:
        text = self._text
        while (start := text.find(FUNCTION_STOP, at)) >= 0:
            at = skip_space(text, start + len(FUNCTION_STOP))
            if text.startswith(STOP, at):
                return start, at + len(STOP)
        return None


def _read_call(text: str, start: int, closes: ClosingTags, tools: Sequence[Tool]) -> tuple[Call, int]:
    block = _read_function(text, start, closes)
    if block is None:
        closed = text.startswith(STOP, block_end(text, start) - len(STOP))
        kind = ProblemKind.BAD_FORM if closed else ProblemKind.UNCLOSED
        raise Unreadable(kind, "expected <function=name>...</function>")
    if not block.name:
        raise Unreadable(ProblemKind.NO_NAME, "the call has no name")
    types = _types(block.name, tools)
    arguments: dict[str, Any] = {}
    at = skip_space(block.body, 0)
    while (parameter := _read_parameter(block.body, at)) is not None:
        value = parameter.body.removeprefix("\n").removesuffix("\n")
        arguments[parameter.name] = _value(value, types.get(parameter.name))
        at = skip_space(block.body, parameter.stop)
    if at < len(block.body):
        found = block.body[at : at + 40].rstrip()
        raise Unreadable(ProblemKind.BAD_ARGUMENTS, f"expected <parameter=name>, found {found!r}")
    return Call(block.name, json.dumps(arguments, ensure_ascii=False)), block.stop


def _read_function(text: str, start: int, closes: ClosingTags) -> NamedBlock | None:
    """Return the function block of the call at `start`; it ends where the call ends."""
    opening = _read_opening(text, skip_space(text, start + len(START)), FUNCTION)
    if opening is None:
        return None
    name, inside = opening
    close = closes.first_after(inside)
    return None if close is None else NamedBlock(name, text[inside : close[0]], close[1])


def _read_parameter(body: str, at: int) -> NamedBlock | None:
    """Return the parameter block at `at`. It ends at the first closing tag before another parameter or the end."""
    opening = _read_opening(body, at, PARAMETER)
    if opening is None or not opening[0]:
        return None
    name, inside = opening
    stop = body.find(PARAMETER_STOP, inside)
    while stop >= 0:
        behind = skip_space(body, stop + len(PARAMETER_STOP))
        if behind == len(body) or body.startswith(PARAMETER, behind):
            return NamedBlock(name, body[inside:stop], behind)
        stop = body.find(PARAMETER_STOP, behind)
    return None


def _read_opening(text: str, at: int, tag: str) -> tuple[str, int] | None:
    """Return the name in the opening tag at `at`, which must be on one line, and the end of the tag."""
    if not text.startswith(tag, at):
        return None
    end = text.find(">", at)
    name = text[at + len(tag) : end]
    return None if end < 0 or "\n" in name else (name.strip(), end + 1)


def _types(name: str, tools: Sequence[Tool]) -> Mapping[str, Any]:
    """The declared type of each parameter of a tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters: dict[str, Any] = function.get("parameters") or {}
            properties: dict[str, Any] = parameters.get("properties") or {}
            return {key: schema.get("type") for key, schema in properties.items() if hasattr(schema, "get")}
    return {}


def _value(text: str, declared: Any) -> Any:
    if declared == "string":
        return text
    if text.strip() in LITERALS and declared != "string":
        return LITERALS[text.strip()]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) and declared is None else value
