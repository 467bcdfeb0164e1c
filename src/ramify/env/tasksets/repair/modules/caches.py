"""Simulations of caches. A list of keys says which keys are requested, in order."""


def simulate_lru(keys: list[str], capacity: int) -> list[bool]:
    """Return whether each request hits a cache that keeps the `capacity` (at least 1) most recently used keys."""
    cache: list[str] = []
    hits: list[bool] = []
    for key in keys:
        hits.append(key in cache)
        if key in cache:
            cache.remove(key)
        elif len(cache) == capacity:
            cache.pop(0)
        cache.append(key)
    return hits


def count_evictions(keys: list[str], capacity: int) -> int:
    """Return how many keys leave a cache that replaces the key that has been in it for the longest time."""
    cache: list[str] = []
    evictions = 0
    for key in keys:
        if key in cache:
            continue
        if len(cache) >= capacity:
            cache.pop(0)
            evictions += 1
        cache.append(key)
    return evictions


def find_expired(entries: list[list], now: int, lifetime: int) -> list[str]:
    """Return the keys of the entries [key, time] that are older than `lifetime` at time `now`, oldest first.

    An entry that is exactly `lifetime` old is not expired. Of equally old entries, the keys are sorted.
    """
    expired = [(time, key) for key, time in entries if now - time > lifetime]
    return [key for _, key in sorted(expired)]
