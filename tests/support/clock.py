"""A clock that a test sets, for classes that take a `clock`."""


class FakeClock:
    """Seconds that pass only when the test advances them; an instance is called like `time.monotonic`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
