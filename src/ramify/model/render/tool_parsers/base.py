"""Shared by all tool parsers: the result of parsing a reply, and JSON objects inside a text."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import Struct

WHITESPACE_RE = re.compile(r"\s*")
MAX_PROBLEMS = 32
"""The maximum number of malformed calls that are reported for one reply.

Parsing a well-formed call takes time linear in its length. Rejecting a malformed call may take time linear in all text
after it, so the number of malformed calls is bounded to keep the time for a reply linear.
"""
ToolSchema = Mapping[str, Any]
"""A tool as the template gets it: `{"type": "function", "function": {name, description, parameters}}`."""

_decoder = json.JSONDecoder()


class ParseProblemKind(StrEnum):
    """What is wrong with a part of a reply that could not be parsed."""

    INVALID_JSON = "invalid_json"
    NO_NAME = "no_name"
    BAD_ARGUMENTS = "bad_arguments"  # the arguments are not a JSON object
    UNCLOSED = "unclosed"  # the call never ends
    BAD_FORM = "bad_form"  # not the syntax of the format
    UNCLOSED_REASONING = "unclosed_reasoning"


@dataclass(frozen=True, slots=True)
class ParseProblem:
    """A part of a reply that could not be parsed. Its text stays in the content of the message."""

    kind: ParseProblemKind
    text: str
    detail: str = ""


class RawToolCall(NamedTuple):
    """A call as the model wrote it; most formats have no call ids."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a format writes calls, for the grammar of a reply that must be a call.

    A call is `before_name`, the name, `before_arguments`, the arguments and `after_arguments`; `start` and `stop` stand
    around all calls, and `separator` between two. A lone line break may be left out.
    """

    before_name: Sequence[str]
    before_arguments: Sequence[str]
    after_arguments: Sequence[str]
    start: Sequence[str] = ()
    separator: Sequence[str] = ("\n",)
    stop: Sequence[str] = ()
    has_quoted_name: bool = True
    """Whether the name is a JSON string; otherwise it is plain text."""
    parameter: tuple[str, str, str] | None = None
    """The texts before the name, before the value and after the value of a parameter; None for JSON arguments."""


class ToolParseError(Exception):
    """A call is malformed. Raised and caught only inside tool parsers."""

    def __init__(self, kind: ParseProblemKind, detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class ToolParseResult(Struct):
    """The text, calls and problems of a reply, collected from left to right."""

    calls: list[RawToolCall] = []
    problems: list[ParseProblem] = []
    _text_parts: list[str] = []

    def add_text(self, text: str) -> None:
        """Add text that is not a call."""
        self._text_parts.append(text)

    def add_calls(self, *calls: RawToolCall) -> None:
        """Add parsed calls. Raises ToolParseError for lone surrogates, which cannot be stored."""
        try:
            "".join(text or "" for call in calls for text in call).encode()
        except UnicodeEncodeError as error:
            raise ToolParseError(ParseProblemKind.INVALID_JSON, str(error)) from error
        self.calls += calls

    def add_problem(self, error: ToolParseError, text: str) -> None:
        """Report a malformed call and keep it as text."""
        self.problems.append(ParseProblem(error.kind, text, error.detail))
        self._text_parts.append(text)

    @property
    def content(self) -> str:
        """The text beside the calls, without the line breaks that separate them."""
        if not self.calls:
            return "".join(self._text_parts)
        lines = (part.strip("\n") for part in self._text_parts)
        return "\n".join(line for line in lines if line)


ToolParser = Callable[[str, Sequence[ToolSchema]], ToolParseResult]
BlockParser = Callable[[str, int], tuple[Sequence[RawToolCall], int]]
"""Parses the block at a position of a text; returns its calls and its end, or raises ToolParseError."""
BlockRecovery = Callable[[str, int, ToolParseError], tuple[ToolParseError, int]]
"""Returns the error to report for the malformed block at a position, and the end of the block."""


def parse_as_text(text: str, tools: Sequence[ToolSchema]) -> ToolParseResult:
    """Return the whole reply as text, for models that do not call tools."""
    result = ToolParseResult()
    result.add_text(text)
    return result


def parse_tagged(text: str, tag: str, parse_block: BlockParser, recover: BlockRecovery) -> ToolParseResult:
    """Parse a reply in which every occurrence of `tag` starts a block of calls."""
    result = ToolParseResult()
    position = 0
    while (start := text.find(tag, position)) >= 0:
        result.add_text(text[position:start])
        try:
            calls, position = parse_block(text, start)
            result.add_calls(*calls)
        except ToolParseError as error:
            if len(result.problems) == MAX_PROBLEMS - 1:
                detail = f"{error.detail}; the reply holds {MAX_PROBLEMS} malformed calls, what follows is not read"
                result.add_problem(ToolParseError(error.kind, detail), text[start:])
                return result
            error, position = recover(text, start, error)
            result.add_problem(error, text[start:position])
    result.add_text(text[position:])
    return result


class RawJsonObject(NamedTuple):
    """A JSON object inside a text: where it ends, and the source text of its values."""

    stop: int
    raw_values: dict[str, str]

    def get_text(self, key: str) -> str | None:
        """Return the value of `key` if it is a non-empty string."""
        value = _load_json(self.raw_values.get(key, "null"))
        return value if isinstance(value, str) and value else None


def _load_json(text: str) -> Any:
    """Parse a value that was parsed before; deeply nested, it may now exceed the recursion limit."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ToolParseError(ParseProblemKind.INVALID_JSON, str(error)) from error


def skip_whitespace(text: str, position: int) -> int:
    """Return the position of the next character that is not whitespace."""
    match = WHITESPACE_RE.match(text, position)
    return match.end() if match else position


def parse_object(text: str, position: int) -> RawJsonObject:
    """Parse the object at `position`. Values keep the form that the model wrote, with its whitespace and escapes."""
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


def expect_object(text: str, position: int) -> RawJsonObject:
    """Parse the object at `position`; text that does not start with a brace is a `BAD_FORM` problem."""
    if text[position] != "{":
        raise ToolParseError(ParseProblemKind.BAD_FORM, f"expected an object, found {text[position : position + 40]!r}")
    return parse_object(text, position)


def parse_call(json_object: RawJsonObject) -> RawToolCall:
    """Return the call of an object with `name` and `arguments` (or `parameters`)."""
    name = json_object.get_text("name")
    if name is None:
        raise ToolParseError(ParseProblemKind.NO_NAME, "the call has no name")
    arguments = json_object.raw_values.get("arguments", json_object.raw_values.get("parameters", "{}"))
    return RawToolCall(name, normalize_arguments(arguments), json_object.get_text("id"))


def normalize_arguments(raw_arguments: str) -> str:
    """Return the JSON object of the arguments; if they are a JSON string, the object inside it."""
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
