"""Checks for plain data: values that can be encoded and decoded without the package that created them.

A value is checked when it is set, so that the error points to the code that set it. A check on sending would not.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from ramify.core.errors import OperationInvalid

MAX_DEPTH = 64  # of nested dicts and lists; a value that contains itself would be infinite


def to_plain(value: object, key: str, depth: int = 0) -> Any:
    """Convert `value` to None, bool, int, float, str, list and dict. Raises OperationInvalid, which names `key`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _check_text(value, key)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise OperationInvalid(f"{key}: an int of {value.bit_length()} bits does not fit into 64")
        return int(value)
    if depth == MAX_DEPTH and isinstance(value, (Mapping, list, tuple)):
        raise OperationInvalid(f"{key}: a {type(cast(object, value)).__qualname__} nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return CheckedDict(key, cast(Mapping[str, object], value), partial(to_plain, depth=depth + 1))
    if isinstance(value, (list, tuple)):
        return [to_plain(item, f"{key}[{i}]", depth + 1) for i, item in enumerate(cast(Iterable[object], value))]
    if isinstance(value, np.floating):
        return float(cast(float, value))
    if isinstance(value, np.bool_ | np.integer):
        return to_plain(cast(object, value.item()), key)
    name = type(value).__qualname__
    raise OperationInvalid(f"{key}: a {name} cannot be encoded; use None, bool, int, float, str, list or dict")


def check_reward(value: object, key: str) -> Any:
    """Check a reward: (score, weight), or None if its function did not run."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and len(cast(Sequence[object], value)) == 2:
        first, second = cast(Sequence[object], value)
        return (check_number(first, key), check_number(second, f"weight of {key}"))
    raise OperationInvalid(f"{key}: expected (score, weight) or None, found {_describe(value)}")


def check_number(value: object, key: str) -> float:
    """Return a finite number as a float."""
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        try:
            number = float(cast(float, value))
        except OverflowError:
            raise OperationInvalid(
                f"{key}: expected a finite number, found an int that is too large for a float"
            ) from None
        if math.isfinite(number):
            return number
    raise OperationInvalid(f"{key}: expected a finite number, found {_describe(value)}")


class CheckedDict(dict[str, Any]):
    """A dict that checks and converts each value when it is set; errors call the dict `path`."""

    __slots__ = ("_check", "_path")

    def __init__(
        self, path: str, items: Mapping[str, object] | None = None, check: Callable[..., Any] = to_plain
    ) -> None:
        super().__init__()
        self._path = path
        self._check = check
        if items:
            self.update(items)

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(_check_key(key, self._path), self._check(value, f"{self._path}.{key}"))

    def update(self, *others: Mapping[str, object] | Iterable[tuple[str, object]], **named: object) -> None:  # type: ignore[override]
        """Check and set several values, as `dict.update` does."""
        items = dict(*others, **named)
        super().update({_check_key(key, self._path): self._check(items[key], f"{self._path}.{key}") for key in items})

    def setdefault(self, key: str, default: object = None) -> Any:
        """Return the value of a key, which is checked and set first if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy, and what is unpickled, is a plain dict

    def __ior__(self, other: Mapping[str, object]) -> "CheckedDict":  # type: ignore[override]
        self.update(other)
        return self


def _describe(value: object) -> str:
    return f"{value!r:.80} of type {type(value).__qualname__}"


def _check_key(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise OperationInvalid(f"{path}: key {key!r} is a {type(key).__qualname__}; keys are str")
    return _check_text(key, path)


def _check_text(value: str, key: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise OperationInvalid(f"{key}: a str that is not valid Unicode: {error.reason} at {error.start}") from None
    return str.__str__(value)  # a plain str, also for an enum or another subclass
