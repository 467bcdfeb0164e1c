"""Verdicts: which JSON object a judge must reply with, and how it is read."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeGuard, TypeVar

import msgspec

from ramify.core.config.schema import is_dict
from ramify.env.chat_client import EXCERPT_CHARS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VerdictFormat(Generic[T]):
    """The JSON object that a judge replies with.

    - `fields`: the JSON schema of each field, all of which are required. A text `reason` comes before them.
    - `parse`: returns the value of a verdict. It raises ValueError, which says what is wrong, for the model to repair.
    """

    fields: Mapping[str, Any]
    parse: Callable[[dict[str, Any]], T]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the verdict."""
        return build_object_schema({"reason": {"type": "string"}, **self.fields})

    def read(self, text: str) -> T:
        """Return the value of the verdict in a reply. Raises ValueError if it has none."""
        return self.parse(parse_last_json_object(text))


def build_object_schema(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object with exactly these fields."""
    return {"type": "object", "properties": dict(fields), "required": [*fields], "additionalProperties": False}


def parse_last_json_object(text: str) -> dict[str, Any]:
    """Return the last JSON object in a text. Judges often write an explanation before it, or a code fence around it."""
    end = text.rfind("}") + 1
    for start in reversed([match.start() for match in re.finditer(r"\{", text)]):
        try:
            value = msgspec.json.decode(text[start:end])
        except (msgspec.DecodeError, RecursionError):
            continue
        if is_dict(value):
            return value
    raise ValueError(f"expected a JSON object, found {format_tail(text)}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of a JSON object is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_tail(text: str) -> str:
    """Return the end of a text for an error message."""
    return repr(text if len(text) <= EXCERPT_CHARS else f"...{text[-EXCERPT_CHARS:]}")
