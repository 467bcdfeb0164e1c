"""In which order attempts are sent out: that of issue, and those that have to be run again before all others."""

import heapq
from collections.abc import Callable
from typing import NamedTuple


class QueuedAttempt(NamedTuple):
    """One attempt that waits to be sent out; `again` is how often it was before."""

    group: int
    attempt: int
    again: int = 0


class AttemptQueue:
    """Attempts that wait, and those that are out. No clock, no I/O."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bool, int, int, int]] = []  # (first try, group, attempt, tries before)
        self._in_flight: set[tuple[int, int]] = set()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def push(self, group: int, attempt: int, num_retries: int = 0) -> None:
        """An attempt is to be sent out."""
        heapq.heappush(self._waiting, (not num_retries, group, attempt, num_retries))

    def pop(self, limit: int, can_dispatch: Callable[[int], bool] = lambda group: True) -> QueuedAttempt | None:
        """The next attempt, unless `limit` of them are out already or its group may not be sent out."""
        if not self._waiting or self.num_in_flight >= limit or not can_dispatch(self._waiting[0][1]):
            return None
        _, group, attempt, again = heapq.heappop(self._waiting)
        self._in_flight.add((group, attempt))
        return QueuedAttempt(group, attempt, again)

    def mark_done(self, group: int, attempt: int) -> None:
        """An attempt is no longer out, however it ended."""
        self._in_flight.discard((group, attempt))

    def remove_group(self, group: int) -> None:
        """A group is no more: nothing of it is sent out, and what is out is not waited for."""
        self._waiting = [each for each in self._waiting if each[1] != group]
        heapq.heapify(self._waiting)
        self._in_flight = {each for each in self._in_flight if each[0] != group}
