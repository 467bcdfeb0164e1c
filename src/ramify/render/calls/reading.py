"""What every format shares: the result of reading a reply, and objects of JSON in the middle of a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ramify.render.conversation import Problem, ProblemKind, Tool

SPACE = re.compile(r"\s*")
MAX_PROBLEMS = 32
"""The most malformed calls of one reply that are reported.

Reading a well-formed call takes time linear in its length. Finding out that a call is malformed may take time linear in
all text after it, so the number of malformed calls is bounded to keep the time for a reply linear.
"""
_decoder = json.JSONDecoder()


class Call(NamedTuple):
    """A call as it was written; most formats give it no id."""

    name: str
    arguments: str
    id: str | None = None


class Unreadable(Exception):
    """A call does not have the form it should. Never leaves a reader."""

    def __init__(self, kind: ProblemKind, detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass
class Reading:
    """A reply taken apart: pieces of text, calls and problems, collected from left to right."""

    calls: list[Call] = field(default_factory=list[Call])
    problems: list[Problem] = field(default_factory=list[Problem])
    _said: list[str] = field(default_factory=list[str])

    def say(self, text: str) -> None:
        """Text that is no call."""
        self._said.append(text)

    def call(self, *calls: Call) -> None:
        """Calls that were read; an escape may spell half a character, which no trace and no tool can hold."""
        try:
            "".join(text or "" for call in calls for text in call).encode()
        except UnicodeEncodeError as error:
            raise Unreadable(ProblemKind.INVALID_JSON, str(error)) from error
        self.calls += calls

    def refuse(self, problem: Unreadable, text: str) -> None:
        """A call that cannot be read: reported, and kept as text."""
        self.problems.append(Problem(problem.kind, text, problem.detail))
        self._said.append(text)

    def refuse_rest(self, problem: Unreadable, text: str) -> None:
        """Report the malformed call at the start of `text`, and do not read the rest: the limit is reached."""
        detail = f"{problem.detail}; the reply holds {MAX_PROBLEMS} malformed calls, what follows is not read"
        self.refuse(Unreadable(problem.kind, detail), text)

    @property
    def is_at_limit(self) -> bool:
        """Whether the next malformed call is the last one that is reported."""
        return len(self.problems) >= MAX_PROBLEMS - 1

    @property
    def content(self) -> str:
        """What was said beside the calls, without the line breaks that set them off."""
        if not self.calls:
            return "".join(self._said)
        lines = (piece.strip("\n") for piece in self._said)
        return "\n".join(line for line in lines if line)


Format = Callable[[str, Sequence[Tool]], Reading]


def nothing(text: str, tools: Sequence[Tool]) -> Reading:
    """The format of a model that calls no tools."""
    reading = Reading()
    reading.say(text)
    return reading


class JsonObject(NamedTuple):
    """An object found in a text: where it ends, and its values as they were written."""

    stop: int
    values: dict[str, str]

    def text(self, key: str) -> str | None:
        """The value under `key` if it is a text that is not empty."""
        value = _loaded(self.values.get(key, "null"))
        return value if isinstance(value, str) and value else None


def _loaded(text: str) -> Any:
    """A value that was read before; nested as deep as just went, it may not go a few calls further down."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise Unreadable(ProblemKind.INVALID_JSON, str(error)) from error


def skip_space(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return match.end() if match else at


def read_object(text: str, at: int) -> JsonObject:
    """The object that begins at `at`. Values keep the form the model gave them, spaces and escapes included."""
    try:
        value, stop = _decoder.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise Unreadable(ProblemKind.INVALID_JSON, str(error)) from error
    if not isinstance(value, dict):
        raise Unreadable(ProblemKind.BAD_FORM, f"expected an object, found {type(value).__name__}")
    values: dict[str, str] = {}
    at = skip_space(text, at + 1)
    while text[at] != "}":
        key, at = _decoder.raw_decode(text, at)
        at = skip_space(text, skip_space(text, at) + 1)
        _, end = _decoder.raw_decode(text, at)
        values[key] = text[at:end]
        at = skip_space(text, end)
        at = skip_space(text, at + 1) if text[at] == "," else at
    return JsonObject(stop, values)


def read_call(found: JsonObject) -> Call:
    """An object with a name and arguments, which some models write as text or call parameters."""
    name = found.text("name")
    if name is None:
        raise Unreadable(ProblemKind.NO_NAME, "the call has no name")
    written = found.values.get("arguments", found.values.get("parameters", "{}"))
    return Call(name, arguments_text(written), found.text("id"))


def arguments_text(written: str) -> str:
    """The text of a table of arguments, unpacked if it was written as a text that holds one."""
    value = _loaded(written)
    if isinstance(value, str):
        written = value
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise Unreadable(ProblemKind.BAD_ARGUMENTS, "the arguments are not an object")
    return written
