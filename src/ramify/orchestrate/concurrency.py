"""How many attempts are out at once: as many as the engines' caches hold, and no more.

Too few leave an engine idle; too many make it throw away half-written rollouts to make room, or queue them until they
are old. The right number changes with the length of the rollouts, so it is followed: a little more while all that is
allowed is used and the engines have room, a share less as soon as they have not. Between the two nothing moves.
"""

from dataclasses import dataclass

ROOMY, TIGHT = 0.8, 0.95  # shares of the cache in use
MORE, LESS = 1.1, 0.75  # what the limit is multiplied with


@dataclass(frozen=True, slots=True)
class Load:
    """What the engines say: the fullest cache's share in use, and requests that wait."""

    cache: float
    queued: int


class Concurrency:
    """A limit between `least` and `most`, moved by what the engines say."""

    def __init__(self, least: int, most: int, start: int | None = None) -> None:
        self.least, self.most = least, most
        self.limit = min(most, max(least, most if start is None else start))

    def observe(self, load: Load, out: int) -> int:
        """The limit after a look at the engines, while `out` attempts are out."""
        crowded = load.queued > max(1, out // 8)
        if load.cache > TIGHT or crowded:
            # From what is out, if that is less: a limit nobody reached tells nothing.
            self.limit = max(self.least, int(min(self.limit, max(out, 1)) * LESS))
        elif load.cache < ROOMY and load.queued == 0 and out >= self.limit:
            self.limit = min(self.most, max(self.limit + 1, int(self.limit * MORE)))
        return self.limit
