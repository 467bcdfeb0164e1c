"""A small cache of recent results, safe for use by several threads: large prompts are rendered in threads."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Holds at most `size` values by key. When it is full, the value that was stored first is removed."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._values: dict[K, V] = {}
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Store a value."""
        with self._lock:
            if key not in self._values and len(self._values) >= self._max_size:
                del self._values[next(iter(self._values))]
            self._values[key] = value
