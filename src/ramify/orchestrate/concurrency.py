"""Adaptive limit of the attempts in flight: as many as the KV caches of the engines hold.

Too few attempts leave an engine idle; too many make it preempt requests, or queue them until they are stale. The best
limit changes with the length of the rollouts, so it adapts: it grows slowly while it is used up and the caches have
room, and shrinks by a factor as soon as a cache is full or requests queue. In between it stays as it is.
"""

LOW_KV_USAGE, HIGH_KV_USAGE = 0.8, 0.95  # fractions of the KV cache in use
INCREASE_FACTOR, DECREASE_FACTOR = 1.1, 0.75


class ConcurrencyLimiter:
    """A limit between `min_limit` and `max_limit` that follows the load of the engines."""

    def __init__(self, min_limit: int, max_limit: int) -> None:
        self.min_limit, self.max_limit, self.limit = min_limit, max_limit, max_limit

    def update(self, *, kv_usage: float, queued: int, num_in_flight: int) -> int:
        """Adapt the limit to the load that was measured with `num_in_flight` attempts, and return it.

        `kv_usage` is the highest usage of the KV cache of any engine, `queued` the number of queued requests of all.
        """
        is_queueing = queued > max(1, num_in_flight // 8)
        if kv_usage > HIGH_KV_USAGE or is_queueing:
            # Start from the number in flight if it is below the limit: an unused limit carries no information.
            self.limit = max(self.min_limit, int(min(self.limit, max(num_in_flight, 1)) * DECREASE_FACTOR))
        elif kv_usage < LOW_KV_USAGE and queued == 0 and num_in_flight >= self.limit:
            self.limit = min(self.max_limit, max(self.limit + 1, int(self.limit * INCREASE_FACTOR)))
        return self.limit
