"""Qwen-coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`.

Values are bare text. A tool's schema says what they mean: text stays as it is, anything else is read as JSON. Without a
schema a value that is JSON but not a text is taken as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ramify.render.calls.reading import Call, Reading, Unreadable
from ramify.render.calls.tagged import START, STOP, block_end
from ramify.render.conversation import ProblemKind, Tool

CALL = re.compile(r"<tool_call>\s*<function=([^>\n]*)>(.*?)</function>\s*</tool_call>", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
LITERALS = {"True": True, "False": False, "None": None}


def read(text: str, tools: Sequence[Tool]) -> Reading:
    """What is said, and the calls between tags."""
    reading = Reading()
    at = 0
    while (start := text.find(START, at)) >= 0:
        reading.say(text[at:start])
        try:
            call, at = _read_call(text, start, tools)
            reading.call(call)
        except Unreadable as problem:
            at = block_end(text, start)
            reading.refuse(problem, text[start:at])
    reading.say(text[at:])
    return reading


def _read_call(text: str, start: int, tools: Sequence[Tool]) -> tuple[Call, int]:
    match = CALL.match(text, start)
    if match is None:
        closed = text.startswith(STOP, block_end(text, start) - len(STOP))
        kind = ProblemKind.BAD_FORM if closed else ProblemKind.UNCLOSED
        raise Unreadable(kind, "expected <function=name>...</function>")
    name, body = match[1].strip(), match[2]
    if not name:
        raise Unreadable(ProblemKind.NO_NAME, "the call has no name")
    types = _types(name, tools)
    arguments: dict[str, Any] = {}
    at = 0
    for parameter in PARAMETER.finditer(body):
        if parameter.start() != at:
            break
        key = parameter[1].strip()
        arguments[key] = _value(parameter[2].removeprefix("\n").removesuffix("\n"), types.get(key))
        at = parameter.end()
    if body[at:].strip():
        raise Unreadable(ProblemKind.BAD_ARGUMENTS, f"expected <parameter=name>, found {body[at:].strip()[:40]!r}")
    return Call(name, json.dumps(arguments, ensure_ascii=False)), match.end()


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
