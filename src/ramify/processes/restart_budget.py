"""Limit and backoff of the restarts of a process.

A process that dies once a day is a nuisance; one that dies right after every start is a bug, which endless restarts
would hide. So every process has a budget of restarts per hour, and the delay doubles with each restart within it.
"""

import time
from collections import deque
from collections.abc import Callable

RESTART_WINDOW = 3600.0  # seconds for which a restart counts
FIRST_DELAY = 0.5  # seconds before the first restart
MAX_DELAY = 30.0  # seconds


class RestartBudget:
    """The restarts of one process; `num_restarts` counts all of them."""

    def __init__(
        self, max_restarts: int, *, first_delay: float = FIRST_DELAY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_restarts, self._first_delay, self._clock = max_restarts, first_delay, clock
        self._recent_restarts: deque[float] = deque()
        self.num_restarts = 0

    def take_restart(self) -> float | None:
        """Take a restart from the budget and return the delay before it; None if the budget is used up."""
        now = self._clock()
        while self._recent_restarts and self._recent_restarts[0] <= now - RESTART_WINDOW:
            self._recent_restarts.popleft()
        if len(self._recent_restarts) >= self.max_restarts:
            return None
        delay = min(self._first_delay * 2 ** len(self._recent_restarts), MAX_DELAY)
        self._recent_restarts.append(now)
        self.num_restarts += 1
        return delay
