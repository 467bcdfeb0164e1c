"""The limit of attempts in flight follows the load of the engines."""

import pytest

from ramify.infer.client.replica import EngineLoad
from ramify.orchestrate.components import QUEUE_POLLS, ConcurrencyLimiter


def update(limiter: ConcurrencyLimiter, *, kv_usage: float, queued: int, num_in_flight: int, **seconds: float) -> int:
    return limiter.update([EngineLoad(kv_usage, queued, seconds=seconds)], num_in_flight)


def test_limit_grows_while_it_is_used_up_and_caches_have_room():
    limiter = ConcurrencyLimiter(4, 64)
    limiter.limit = 8
    assert [update(limiter, kv_usage=0.3, queued=0, num_in_flight=limiter.limit) for _ in range(4)] == [
        9,
        10,
        11,
        12,
    ]
    assert update(limiter, kv_usage=0.3, queued=0, num_in_flight=5) == 12
    assert update(limiter, kv_usage=0.9, queued=0, num_in_flight=12) == 12
    for _ in range(40):
        update(limiter, kv_usage=0.3, queued=0, num_in_flight=limiter.limit)
    assert limiter.limit == 64


def test_limit_shrinks_when_a_cache_is_full():
    limiter = ConcurrencyLimiter(4, 64)
    assert update(limiter, kv_usage=0.99, queued=0, num_in_flight=64) == 48
    assert update(limiter, kv_usage=0.99, queued=0, num_in_flight=16) == 12
    for _ in range(20):
        update(limiter, kv_usage=1.0, queued=9, num_in_flight=limiter.limit)
    assert limiter.limit == 4


def test_limit_shrinks_when_requests_stay_queued():
    limiter = ConcurrencyLimiter(4, 64)
    limits = [update(limiter, kv_usage=0.5, queued=20, num_in_flight=limiter.limit) for _ in range(2 * QUEUE_POLLS)]
    assert limits == [64] * (QUEUE_POLLS - 1) + [48] * QUEUE_POLLS + [36]


@pytest.mark.parametrize("kv_usage", [0.99, 0.5])
def test_limit_shrinks_again_only_after_a_cut_has_taken_effect(kv_usage):
    """Attempts in flight are not cancelled: until enough have ended, the load says nothing about the lower limit."""
    limiter = ConcurrencyLimiter(4, 64)
    while limiter.limit == 64:
        update(limiter, kv_usage=kv_usage, queued=20, num_in_flight=64)
    for num_in_flight in (64, 63, 62, 60, 57, 53, 49):
        assert update(limiter, kv_usage=kv_usage, queued=20, num_in_flight=num_in_flight) == 48
    num_polls = 1 if kv_usage == 0.99 else QUEUE_POLLS
    limits = [update(limiter, kv_usage=kv_usage, queued=20, num_in_flight=48) for _ in range(num_polls)]
    assert limits == [48] * (num_polls - 1) + [36]


def test_limit_ignores_the_queue_at_the_start_of_a_wave():
    """All requests of a wave are queued at first, and with large waves whenever someone looks but once."""
    limiter = ConcurrencyLimiter(128, 256)
    for poll in range(100):
        queued = 0 if poll % QUEUE_POLLS == 0 else 256
        assert update(limiter, kv_usage=0.5, queued=queued, num_in_flight=256) == 256


def test_limit_stays_while_engines_wait_for_the_trainer():
    for kv_usage, limit in ((0.99, 48), (0.5, 64)):
        limiter = ConcurrencyLimiter(4, 64)
        assert update(limiter, kv_usage=kv_usage, queued=20, num_in_flight=64, sampling=3.5) == limit
        for _ in range(20):
            assert update(limiter, kv_usage=kv_usage, queued=20, num_in_flight=48, sampling=3.5) == limit
    assert update(limiter, kv_usage=0.99, queued=20, num_in_flight=48, sampling=3.6) == 36


def test_limit_converges_to_the_capacity_of_the_engines():
    """An engine whose cache holds 40 rollouts: the limit stays near it, up from below and down from above."""
    for start in (4, 400):
        limiter, limits = ConcurrencyLimiter(4, 400), []
        limiter.limit = start
        for _ in range(200):
            used = limiter.limit
            limits.append(update(limiter, kv_usage=min(1.0, used / 40), queued=max(0, used - 40), num_in_flight=used))
        assert all(28 <= value <= 42 for value in limits[100:])
