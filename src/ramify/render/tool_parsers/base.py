"""What every format shares: the result of reading a reply, and objects of JSON in the middle of a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ramify.render.base import ParseProblem, ParseProblemKind, ToolSchema

WHITESPACE_RE = re.compile(r"\s*")
MAX_PROBLEMS = 32
"""The most malformed calls of one reply that are reported.

Reading a well-formed call takes time linear in its length. Finding out that a call is malformed may take time linear in
all text after it, so the number of malformed calls is bounded to keep the time for a reply linear.
"""
_decoder = json.JSONDecoder()


class RawToolCall(NamedTuple):
    """A call as it was written; most formats give it no id."""

    name: str
    arguments: str
    id: str | None = None


class ToolParseError(Exception):
    """A call does not have the form it should. Never leaves a reader."""

    def __init__(self, kind: ParseProblemKind, detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass
class ToolParseResult:
    """A reply taken apart: pieces of text, calls and problems, collected from left to right."""

    calls: list[RawToolCall] = field(default_factory=list[RawToolCall])
    problems: list[ParseProblem] = field(default_factory=list[ParseProblem])
    _text_parts: list[str] = field(default_factory=list[str])

    def add_text(self, text: str) -> None:
        """Text that is no call."""
        self._text_parts.append(text)

    def add_calls(self, *calls: RawToolCall) -> None:
        """Calls that were read; an escape may spell half a character, which no trace and no tool can hold."""
        try:
            "".join(text or "" for call in calls for text in call).encode()
        except UnicodeEncodeError as error:
            raise ToolParseError(ParseProblemKind.INVALID_JSON, str(error)) from error
        self.calls += calls

    def add_problem(self, error: ToolParseError, text: str) -> None:
        """A call that cannot be read: reported, and kept as text."""
        self.problems.append(ParseProblem(error.kind, text, error.detail))
        self._text_parts.append(text)

    def add_last_problem(self, error: ToolParseError, text: str) -> None:
        """Report the malformed call at the start of `text`, and do not read the rest: the limit is reached."""
        detail = f"{error.detail}; the reply holds {MAX_PROBLEMS} malformed calls, what follows is not read"
        self.add_problem(ToolParseError(error.kind, detail), text)

    @property
    def is_at_problem_limit(self) -> bool:
        """Whether the next malformed call is the last one that is reported."""
        return len(self.problems) >= MAX_PROBLEMS - 1

    @property
    def content(self) -> str:
        """What was said beside the calls, without the line breaks that set them off."""
        if not self.calls:
            return "".join(self._text_parts)
        lines = (piece.strip("\n") for piece in self._text_parts)
        return "\n".join(line for line in lines if line)


ToolParser = Callable[[str, Sequence[ToolSchema]], ToolParseResult]


def parse_as_text(text: str, tools: Sequence[ToolSchema]) -> ToolParseResult:
    """The format of a model that calls no tools."""
    reading = ToolParseResult()
    reading.add_text(text)
    return reading


class RawJsonObject(NamedTuple):
    """An object found in a text: where it ends, and its values as they were written."""

    stop: int
    raw_values: dict[str, str]

    def get_text(self, key: str) -> str | None:
        """The value under `key` if it is a text that is not empty."""
        value = _load_json(self.raw_values.get(key, "null"))
        return value if isinstance(value, str) and value else None


def _load_json(text: str) -> Any:
    """A value that was read before; nested as deep as just went, it may not go a few calls further down."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ToolParseError(ParseProblemKind.INVALID_JSON, str(error)) from error


def skip_whitespace(text: str, position: int) -> int:
    match = WHITESPACE_RE.match(text, position)
    return match.end() if match else position


def parse_object(text: str, position: int) -> RawJsonObject:
    """The object that begins at `at`. Values keep the form the model gave them, spaces and escapes included."""
    try:
        value, stop = _decoder.raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        raise ToolParseError(ParseProblemKind.INVALID_JSON, str(error)) from error
    if not isinstance(value, dict):
        raise ToolParseError(ParseProblemKind.BAD_FORM, f"expected an object, found {type(value).__name__}")
    values: dict[str, str] = {}
    position = skip_whitespace(text, position + 1)
    while text[position] != "}":
        key, position = _decoder.raw_decode(text, position)
        position = skip_whitespace(text, skip_whitespace(text, position) + 1)
        _, end = _decoder.raw_decode(text, position)
        values[key] = text[position:end]
        position = skip_whitespace(text, end)
        position = skip_whitespace(text, position + 1) if text[position] == "," else position
    return RawJsonObject(stop, values)


def parse_call(json_object: RawJsonObject) -> RawToolCall:
    """An object with a name and arguments, which some models write as text or call parameters."""
    name = json_object.get_text("name")
    if name is None:
        raise ToolParseError(ParseProblemKind.NO_NAME, "the call has no name")
    written = json_object.raw_values.get("arguments", json_object.raw_values.get("parameters", "{}"))
    return RawToolCall(name, normalize_arguments(written), json_object.get_text("id"))


def normalize_arguments(raw_arguments: str) -> str:
    """The text of a table of arguments, unpacked if it was written as a text that holds one."""
    value = _load_json(raw_arguments)
    if isinstance(value, str):
        raw_arguments = value
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise ToolParseError(ParseProblemKind.BAD_ARGUMENTS, "the arguments are not an object")
    return raw_arguments
