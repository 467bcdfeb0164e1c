"""A small cache that several threads may use: prompts are rendered in threads, and threads answer the page."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Holds at most `max_size` values by key. When it is full, the least recently used value is removed.

    `discard` gets each value that is removed or replaced. `measure` returns the size of a value, which must not change;
    by default each value counts as 1. The newest value is kept even if it is larger than `max_size`.
    """

    def __init__(
        self,
        max_size: int,
        discard: Callable[[V], object] = lambda _: None,
        *,
        measure: Callable[[V], int] = lambda _: 1,
    ) -> None:
        self._max_size, self._discard, self._measure = max_size, discard, measure
        self._values: dict[K, V] = {}
        self._size = 0
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
            removed = self._store(key, value)
        for old_value in removed:
            self._discard(old_value)

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key; make and store it if it is missing.

        Other threads are not kept waiting meanwhile. If one of them stores a value for the key first, that one is
        returned, and the second is discarded.
        """
        value = self.get(key)
        if value is not None:
            return value
        made = make()
        with self._lock:
            value = self._values.get(key)
            removed = [made] if value is not None else self._store(key, made)
        for old_value in removed:
            self._discard(old_value)
        return made if value is None else value

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            values, self._values, self._size = list(self._values.values()), {}, 0
        for value in values:
            self._discard(value)

    def _store(self, key: K, value: V) -> list[V]:
        """Store a value and return those that were removed for it. The caller holds the lock."""
        removed = [self._values.pop(key)] if key in self._values else []
        self._values[key] = value
        self._size += self._measure(value) - sum(map(self._measure, removed))
        while self._size > self._max_size and len(self._values) > 1:
            removed.append(self._values.pop(next(iter(self._values))))
            self._size -= self._measure(removed[-1])
        return removed
