"""In which order attempts are sent out: that of issue, and those that have to be run again before all others."""

import heapq
from collections.abc import Callable
from typing import NamedTuple


class Order(NamedTuple):
    """One attempt that waits to be sent out; `again` is how often it was before."""

    group: int
    attempt: int
    again: int = 0


class Dispatch:
    """Attempts that wait, and those that are out. No clock, no I/O."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bool, int, int, int]] = []  # (first try, group, attempt, tries before)
        self._out: set[tuple[int, int]] = set()

    @property
    def out(self) -> int:
        return len(self._out)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, group: int, attempt: int, again: int = 0) -> None:
        """An attempt is to be sent out."""
        heapq.heappush(self._waiting, (not again, group, attempt, again))

    def take(self, limit: int, may: Callable[[int], bool] = lambda group: True) -> Order | None:
        """The next attempt, unless `limit` of them are out already or its group may not be sent out."""
        if not self._waiting or self.out >= limit or not may(self._waiting[0][1]):
            return None
        _, group, attempt, again = heapq.heappop(self._waiting)
        self._out.add((group, attempt))
        return Order(group, attempt, again)

    def back(self, group: int, attempt: int) -> None:
        """An attempt is no longer out, however it ended."""
        self._out.discard((group, attempt))

    def forget(self, group: int) -> None:
        """A group is no more: nothing of it is sent out, and what is out is not waited for."""
        self._waiting = [each for each in self._waiting if each[1] != group]
        heapq.heapify(self._waiting)
        self._out = {each for each in self._out if each[0] != group}
