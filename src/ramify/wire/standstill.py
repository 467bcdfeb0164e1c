"""How long an end of a connection did not run itself, because its process was stopped or had no core.

An end that did not run heard nobody, whoever spoke meanwhile. So this time is no silence of the other side: a server
that was stopped for a minute must not forget its clients, and a client must not give up its server.
"""


class Standstill:
    """Measures pauses between two ticks. Only pauses that matter beside `limit`, the silence that is allowed, count:
    an end that is always a little late must still notice that the other side is gone."""

    def __init__(self, limit: float) -> None:
        self._shortest = limit / 4
        self._last: float | None = None

    def measure(self, now: float) -> float:
        """Return the seconds since the last call if the end stood still meanwhile, else 0."""
        last, self._last = self._last, now
        return now - last if last is not None and now - last > self._shortest else 0.0
