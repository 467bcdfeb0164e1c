"""The `state` that the hooks of a rollout share, as text, so that rewards can be computed again later.

A reward may compare types (`state.position == (1, 2)`), so a state is saved exactly or not at all: values, lists,
tuples, sets and dicts are loaded with their types. Other objects are refused, since loading them would run code that
may have changed.
"""

import base64
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from ramify.core.errors import OperationInvalid
from ramify.trace.plain_data import MAX_DEPTH

SCORING_STATE_KEY = "scoring_state"  # the key in the `info` of a trace: {"saved": text} or {"refused": reason}
MAX_STATE_SIZE = 1_000_000  # characters and values of a saved state

_SEQUENCE_TYPES: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def save_state(state: SimpleNamespace) -> str:
    """Return the state as text. Raises OperationInvalid, which names the attribute that cannot be saved."""
    tagger = _Tagger()
    tagged = {name: tagger.tag(value, f"state.{name}") for name, value in vars(state).items()}
    try:
        return json.dumps(tagged)
    except ValueError as error:  # an int with more digits than Python converts
        raise OperationInvalid(f"state: {error}") from error


def load_state(text: str) -> SimpleNamespace:
    """Return the state that `save_state` saved."""
    return SimpleNamespace(**{name: _untag(value) for name, value in json.loads(text).items()})


class _Tagger:
    """Converts values to JSON: containers to [type, content], bytes to base64. Refuses more than `MAX_STATE_SIZE`."""

    def __init__(self) -> None:
        self._size = 0

    def tag(self, value: Any, location: str, depth: int = 0) -> Any:
        if depth == MAX_DEPTH:
            raise OperationInvalid(f"{location} is nested more than {MAX_DEPTH} deep")
        kind = cast(type[Any], type(value))  # not isinstance: an instance of a subclass may have further attributes
        self._size += 1 + (len(value) if kind in (str, bytes) else 0)
        if self._size > MAX_STATE_SIZE:
            raise OperationInvalid(f"state is larger than {MAX_STATE_SIZE:,} characters")
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is bytes:
            return ["bytes", base64.b64encode(value).decode()]
        if kind is dict:
            items = [
                (self.tag(key, location, depth + 1), self.tag(value[key], f"{location}[{key!r}]", depth + 1))
                for key in value
            ]
            return ["dict", items]
        if kind in _SEQUENCE_TYPES.values():
            return [kind.__name__, [self.tag(item, f"{location}[{i}]", depth + 1) for i, item in enumerate(value)]]
        raise OperationInvalid(
            f"{location} is a {kind.__qualname__}, and only values, lists, tuples, sets and dicts are saved"
        )


def _untag(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = cast(list[Any], value)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dict":
        return {_untag(key): _untag(item) for key, item in content}
    return _SEQUENCE_TYPES[kind](map(_untag, content))
