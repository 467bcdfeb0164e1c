"""Attempts go out in the order of issue, those that are run again first, and never more than allowed."""

from ramify.orchestrate.attempt_queue import AttemptQueue, QueuedAttempt
from ramify.orchestrate.concurrency import CombinedLoad, ConcurrencyLimiter


def filled() -> AttemptQueue:
    dispatch = AttemptQueue()
    for group in (1, 0):
        for attempt in range(2):
            dispatch.push(group, attempt)
    return dispatch


def test_attempts_go_out_in_the_order_of_issue():
    dispatch = filled()
    assert [dispatch.pop(9) for _ in range(5)] == [
        QueuedAttempt(0, 0),
        QueuedAttempt(0, 1),
        QueuedAttempt(1, 0),
        QueuedAttempt(1, 1),
        None,
    ]


def test_what_is_run_again_goes_first():
    dispatch = filled()
    dispatch.push(7, 3, num_retries=1)
    assert dispatch.pop(9) == QueuedAttempt(7, 3, again=1)


def test_no_more_are_out_than_allowed():
    dispatch = filled()
    assert [dispatch.pop(2) for _ in range(3)] == [QueuedAttempt(0, 0), QueuedAttempt(0, 1), None]
    dispatch.mark_done(0, 0)
    assert dispatch.pop(2) == QueuedAttempt(1, 0)
    assert (dispatch.num_in_flight, dispatch.num_waiting) == (2, 1)


def test_nothing_of_a_forgotten_group_is_sent_out_or_waited_for():
    dispatch = filled()
    dispatch.pop(9)
    dispatch.remove_group(0)
    assert dispatch.num_in_flight == 0
    assert dispatch.pop(9) == QueuedAttempt(1, 0)
    dispatch.mark_done(0, 0)
    assert (dispatch.num_in_flight, dispatch.num_waiting) == (1, 1)


def test_the_limit_rises_while_the_engines_have_room_and_all_of_it_is_used():
    limit = ConcurrencyLimiter(4, 64, initial_limit=8)
    assert [limit.update(CombinedLoad(kv_usage=0.3, queued=0), num_in_flight=limit.limit) for _ in range(4)] == [
        9,
        10,
        11,
        12,
    ]
    assert limit.update(CombinedLoad(kv_usage=0.3, queued=0), num_in_flight=5) == 12
    assert limit.update(CombinedLoad(kv_usage=0.9, queued=0), num_in_flight=12) == 12
    for _ in range(40):
        limit.update(CombinedLoad(kv_usage=0.3, queued=0), num_in_flight=limit.limit)
    assert limit.limit == 64


def test_the_limit_falls_when_the_cache_is_full_or_requests_queue():
    limit = ConcurrencyLimiter(4, 64)
    assert limit.update(CombinedLoad(kv_usage=0.99, queued=0), num_in_flight=64) == 48
    assert limit.update(CombinedLoad(kv_usage=0.5, queued=20), num_in_flight=48) == 36
    assert limit.update(CombinedLoad(kv_usage=0.99, queued=0), num_in_flight=16) == 12
    for _ in range(20):
        limit.update(CombinedLoad(kv_usage=1.0, queued=9), num_in_flight=limit.limit)
    assert limit.limit == 4


def test_the_limit_settles_where_the_engines_are_full():
    """An engine whose cache holds 40 rollouts: the limit stays near it, up from below and down from above."""
    for start in (4, 400):
        limit, seen = ConcurrencyLimiter(4, 400, start), []
        for _ in range(200):
            out = limit.limit
            seen.append(limit.update(CombinedLoad(min(1.0, out / 40), max(0, out - 40)), out))
        assert all(28 <= value <= 42 for value in seen[100:])
