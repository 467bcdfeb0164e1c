"""How many attempts are out at once: as many as the engines' caches hold, and no more.

Too few leave an engine idle; too many make it throw away half-written rollouts to make room, or queue them until they
are old. The right number changes with the length of the rollouts, so it is followed: a little more while all that is
allowed is used and the engines have room, a share less as soon as they have not. Between the two nothing moves.
"""

from dataclasses import dataclass

LOW_KV_USAGE, HIGH_KV_USAGE = 0.8, 0.95  # shares of the cache in use
INCREASE_FACTOR, DECREASE_FACTOR = 1.1, 0.75  # what the limit is multiplied with


@dataclass(frozen=True, slots=True)
class CombinedLoad:
    """What the engines say: the fullest cache's share in use, and requests that wait."""

    kv_usage: float
    queued: int


class ConcurrencyLimiter:
    """A limit between `least` and `most`, moved by what the engines say."""

    def __init__(self, min_limit: int, max_limit: int, initial_limit: int | None = None) -> None:
        self.min_limit, self.max_limit = min_limit, max_limit
        self.limit = min(max_limit, max(min_limit, max_limit if initial_limit is None else initial_limit))

    def update(self, load: CombinedLoad, num_in_flight: int) -> int:
        """The limit after a look at the engines, while `out` attempts are out."""
        is_queueing = load.queued > max(1, num_in_flight // 8)
        if load.kv_usage > HIGH_KV_USAGE or is_queueing:
            # From what is out, if that is less: a limit nobody reached tells nothing.
            self.limit = max(self.min_limit, int(min(self.limit, max(num_in_flight, 1)) * DECREASE_FACTOR))
        elif load.kv_usage < LOW_KV_USAGE and load.queued == 0 and num_in_flight >= self.limit:
            self.limit = min(self.max_limit, max(self.limit + 1, int(self.limit * INCREASE_FACTOR)))
        return self.limit
