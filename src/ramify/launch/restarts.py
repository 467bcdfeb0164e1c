"""How often a process may be started again, and how soon.

A process that dies once a day is a nuisance; one that dies at once each time is a bug, and starting it for ever would
hide that. So each has a budget for an hour, and every start within it waits twice as long as the one before.
"""

import time
from collections import deque
from collections.abc import Callable

WINDOW = 3600.0  # seconds a start counts for
FIRST = 0.5  # seconds before the first start
LONGEST = 30.0


class Budget:
    """The restarts of one process."""

    def __init__(self, restarts: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.restarts, self._clock = restarts, clock
        self._spent: deque[float] = deque()
        self.total = 0

    def spend(self) -> float | None:
        """The seconds to wait before the next start; None when the budget is used up."""
        now = self._clock()
        while self._spent and self._spent[0] <= now - WINDOW:
            self._spent.popleft()
        if len(self._spent) >= self.restarts:
            return None
        delay = min(FIRST * 2 ** len(self._spent), LONGEST)
        self._spent.append(now)
        self.total += 1
        return delay
