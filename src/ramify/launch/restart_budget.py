"""How often a process may be started again, and how soon.

A process that dies once a day is a nuisance; one that dies at once each time is a bug, and starting it for ever would
hide that. So each has a budget for an hour, and every start within it waits twice as long as the one before.
"""

import time
from collections import deque
from collections.abc import Callable

RESTART_WINDOW = 3600.0  # seconds a start counts for
FIRST_DELAY = 0.5  # seconds before the first start
MAX_DELAY = 30.0


class RestartBudget:
    """The restarts of one process."""

    def __init__(self, max_restarts: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_restarts, self._clock = max_restarts, clock
        self._recent_restarts: deque[float] = deque()
        self.num_restarts = 0

    def take_restart(self) -> float | None:
        """The seconds to wait before the next start; None when the budget is used up."""
        now = self._clock()
        while self._recent_restarts and self._recent_restarts[0] <= now - RESTART_WINDOW:
            self._recent_restarts.popleft()
        if len(self._recent_restarts) >= self.max_restarts:
            return None
        delay = min(FIRST_DELAY * 2 ** len(self._recent_restarts), MAX_DELAY)
        self._recent_restarts.append(now)
        self.num_restarts += 1
        return delay
