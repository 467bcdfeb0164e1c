"""A small cache that several threads may use: large prompts are rendered in threads."""

import threading
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Holds at most `max_size` values by key. When it is full, the least recently used value is removed."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._values: dict[K, V] = {}
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None:
                self._values[key] = value
            return value

    def put(self, key: K, value: V) -> None:
        """Store a value."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            if len(self._values) > self._max_size:
                del self._values[next(iter(self._values))]
