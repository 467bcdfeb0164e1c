"""How long this end of a connection did not run, because its process was stopped or got no CPU time.

An end that did not run could not receive anything. So this time does not count as silence of the other side: a server
that was stopped for a minute must not forget its clients, and a client must not give up its server.
"""


class PauseDetector:
    """Measures pauses between two ticks.

    A pause counts only if it is longer than a quarter of `limit`, the silence that is allowed: an end that is always a
    little late must still notice that the other side is gone.
    """

    def __init__(self, silence_limit: float) -> None:
        self._min_pause = silence_limit / 4
        self._last: float | None = None

    def measure_pause(self, now: float) -> float:
        """Return the seconds since the last call if they were a pause, else 0."""
        last, self._last = self._last, now
        return now - last if last is not None and now - last > self._min_pause else 0.0
