"""Adaptive limit of the attempts in flight: as many as the KV caches of the engines hold.

Too few attempts leave an engine idle; too many make it preempt requests, or queue them until they are stale. The best
limit changes with the length of the rollouts, so it adapts: it grows slowly while it is used up and the caches have
room, and shrinks by a factor as soon as a cache is full or requests queue. In between it stays as it is.
"""

from dataclasses import dataclass

LOW_KV_USAGE, HIGH_KV_USAGE = 0.8, 0.95  # fractions of the KV cache in use
INCREASE_FACTOR, DECREASE_FACTOR = 1.1, 0.75


@dataclass(frozen=True, slots=True)
class CombinedLoad:
    """Load of all engines: the highest KV cache usage of any, and the number of queued requests of all."""

    kv_usage: float
    queued: int


class ConcurrencyLimiter:
    """A limit between `min_limit` and `max_limit` that follows the load of the engines."""

    def __init__(self, min_limit: int, max_limit: int) -> None:
        self.min_limit, self.max_limit, self.limit = min_limit, max_limit, max_limit

    def update(self, load: CombinedLoad, num_in_flight: int) -> int:
        """Adapt the limit to the load that was measured with `num_in_flight` attempts, and return it."""
        is_queueing = load.queued > max(1, num_in_flight // 8)
        if load.kv_usage > HIGH_KV_USAGE or is_queueing:
            # Start from the number in flight if it is below the limit: an unused limit carries no information.
            self.limit = max(self.min_limit, int(min(self.limit, max(num_in_flight, 1)) * DECREASE_FACTOR))
        elif load.kv_usage < LOW_KV_USAGE and load.queued == 0 and num_in_flight >= self.limit:
            self.limit = min(self.max_limit, max(self.limit + 1, int(self.limit * INCREASE_FACTOR)))
        return self.limit
