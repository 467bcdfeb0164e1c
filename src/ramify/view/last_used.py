"""A small cache for threads of the server."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

MAX_CACHED = 8

Key = TypeVar("Key")
Value = TypeVar("Value")


class LastUsed(Generic[Key, Value]):
    """The `MAX_CACHED` values that were used last. `make` builds a missing one; `discard` gets what is removed."""

    def __init__(self, make: Callable[[Key], Value], discard: Callable[[Value], object] = lambda _: None) -> None:
        self._make, self._discard = make, discard
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key) -> Value:
        """Return the value of a key. If building it fails, nothing is kept."""
        with self._lock:
            if key not in self._values:
                self._values[key] = self._make(key)
            self._values.move_to_end(key)
            oldest = self._values.popitem(last=False)[1] if len(self._values) > MAX_CACHED else None
            value = self._values[key]
        if oldest is not None:
            self._discard(oldest)
        return value

    def clear(self) -> None:
        """Remove all values."""
        while self._values:
            self._discard(self._values.popitem()[1])
