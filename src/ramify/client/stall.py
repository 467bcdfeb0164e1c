"""How long a rollout waited for an engine that made no progress.

An engine makes progress while its counter of steps moves, for whichever request it works, or when it answers a request
of the rollout. An engine that is stopped, paused, hung or away does neither, even if it still answers health checks.
The client reads the counter once in `health_interval` seconds, so progress is seen with a delay. A silence of more than
`stall_after` seconds is a stall, all of it; a shorter one is time in which the engine worked.

A request that waits in the queue of an engine which works for others is not stalled: its waiting counts as time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StallClock:
    """The stalls of one rollout: silences of its engine while at least one of its requests waited for it."""

    def __init__(self) -> None:
        self._requests = 0  # that wait for an answer
        self._progress = 0.0  # when the engine last showed progress, or the first of those requests began to wait
        self._tolerance = 0.0  # seconds of silence that are no stall
        self._total = 0.0  # seconds of stalls that are over

    @contextmanager
    def waiting(self, tolerance: float) -> Iterator[None]:
        """A request waits for an engine whose silence of up to `tolerance` seconds is no stall."""
        if not self._requests:
            self._progress = time.monotonic()
        self._requests += 1
        self._tolerance = tolerance
        try:
            yield
        finally:
            self.record_progress()
            self._requests -= 1

    def record_progress(self) -> None:
        """The engine has just shown that it makes progress."""
        now = time.monotonic()
        if self._requests and now - self._progress > self._tolerance:
            self._total += now - self._progress
        self._progress = now

    @property
    def seconds(self) -> float:
        """Seconds of all stalls, with the one that still goes on."""
        silence = time.monotonic() - self._progress if self._requests else 0.0
        return self._total + (silence if silence > self._tolerance else 0.0)

    @property
    def confirmed(self) -> float:
        """The time up to which every second is known to be a stall or not: later ones depend on the next progress."""
        return self._progress if self._requests else time.monotonic()

    @property
    def ended(self) -> float:
        """Seconds of the stalls that are over."""
        return self._total
