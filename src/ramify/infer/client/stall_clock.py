"""A clock that measures how long a rollout waited for an engine that made no progress.

An engine makes progress when its counter of steps moves, for this request or any other, or when it answers a request of
the rollout. An engine that is stopped, paused, hung or unreachable does neither, even if it still answers health
checks. The client reads the counter every `health_interval` seconds, so progress is seen with a delay. If more than
`stall_after` seconds pass without progress, all of them are a stall; if fewer pass, the engine worked all the time.

A request in the queue of an engine that works on other requests is not stalled.
"""

import time


class StallClock:
    """Measures the stalls of one rollout: times without progress while at least one of its requests is in flight."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._last_progress = 0.0  # when progress was last seen, or the first of the requests in flight started
        self._tolerance = 0.0  # seconds without progress that do not count as a stall
        self.ended_seconds = 0.0
        """Seconds of the stalls that have ended, without the current one."""

    def start_request(self, tolerance: float) -> None:
        """Measure stalls until `end_request`; up to `tolerance` seconds without progress do not count."""
        if not self._num_requests:
            self._last_progress = time.monotonic()
        self._num_requests += 1
        self._tolerance = tolerance

    def end_request(self) -> None:
        """Record that a request has ended, which is progress."""
        self.record_progress()
        self._num_requests -= 1

    def record_progress(self) -> None:
        """Record that the engine makes progress now, which ends a stall."""
        now = time.monotonic()
        if self._num_requests and now - self._last_progress > self._tolerance:
            self.ended_seconds += now - self._last_progress
        self._last_progress = now

    @property
    def seconds(self) -> float:
        """Seconds of all stalls, including the current one."""
        waited = time.monotonic() - self._last_progress if self._num_requests else 0.0
        return self.ended_seconds + (waited if waited > self._tolerance else 0.0)

    @property
    def known_until(self) -> float:
        """The monotonic time up to which stalls are known; the next progress decides about the time after it."""
        return self._last_progress if self._num_requests else time.monotonic()
