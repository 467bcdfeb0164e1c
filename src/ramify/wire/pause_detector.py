"""Detects times in which this process did not run, because it was stopped or got no CPU time.

A process that did not run could not receive anything. So this time does not count as silence of the peer: a server that
was stopped for a minute must not close its sessions, and a client must not report its server as lost.
"""


class PauseDetector:
    """Measures pauses between two ticks.

    A pause counts only if it is longer than a quarter of `silence_limit`, the silence that is allowed: a process that
    is always a little late must still notice that its peer is gone.
    """

    def __init__(self, silence_limit: float) -> None:
        self._min_pause = silence_limit / 4
        self._last: float | None = None

    def measure_pause(self, now: float) -> float:
        """Return the seconds since the last call if they were a pause, else 0."""
        last, self._last = self._last, now
        return now - last if last is not None and now - last > self._min_pause else 0.0
