"""The queue of attempts to dispatch: retries first, then in the order of issue."""

import heapq
from collections.abc import Callable
from typing import NamedTuple


class QueuedAttempt(NamedTuple):
    """An attempt to dispatch."""

    group: int
    attempt: int


class AttemptQueue:
    """Attempts that wait, and those in flight. A state machine without clock or I/O."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bool, int, int]] = []  # heap of (is first try, group, attempt)
        self._in_flight: set[tuple[int, int]] = set()

    @property
    def num_in_flight(self) -> int:
        """Number of attempts that were popped and are not done."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Number of attempts in the queue."""
        return len(self._waiting)

    def push(self, group: int, attempt: int, *, is_retry: bool = False) -> None:
        """Queue an attempt."""
        heapq.heappush(self._waiting, (not is_retry, group, attempt))

    def pop(self, limit: int, can_dispatch: Callable[[int], bool] = lambda group: True) -> QueuedAttempt | None:
        """Return the next attempt; None if `limit` are in flight or its group may not be dispatched."""
        if not self._waiting or self.num_in_flight >= limit or not can_dispatch(self._waiting[0][1]):
            return None
        _, group, attempt = heapq.heappop(self._waiting)
        self._in_flight.add((group, attempt))
        return QueuedAttempt(group, attempt)

    def mark_done(self, group: int, attempt: int) -> None:
        """Record that an attempt is no longer in flight, however it ended."""
        self._in_flight.discard((group, attempt))

    def remove_group(self, group: int) -> None:
        """Forget all attempts of a group, waiting and in flight."""
        self._waiting = [entry for entry in self._waiting if entry[1] != group]
        heapq.heapify(self._waiting)
        self._in_flight = {key for key in self._in_flight if key[0] != group}
