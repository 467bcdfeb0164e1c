"""Attempts go out in the order of issue, those that are run again first, and never more than allowed."""

from ramify.orchestrate.concurrency import Concurrency, Load
from ramify.orchestrate.dispatch import Dispatch, Order


def filled() -> Dispatch:
    dispatch = Dispatch()
    for group in (1, 0):
        for attempt in range(2):
            dispatch.add(group, attempt)
    return dispatch


def test_attempts_go_out_in_the_order_of_issue():
    dispatch = filled()
    assert [dispatch.take(9) for _ in range(5)] == [Order(0, 0), Order(0, 1), Order(1, 0), Order(1, 1), None]


def test_what_is_run_again_goes_first():
    dispatch = filled()
    dispatch.add(7, 3, again=1)
    assert dispatch.take(9) == Order(7, 3, again=1)


def test_no_more_are_out_than_allowed():
    dispatch = filled()
    assert [dispatch.take(2) for _ in range(3)] == [Order(0, 0), Order(0, 1), None]
    dispatch.back(0, 0)
    assert dispatch.take(2) == Order(1, 0)
    assert (dispatch.out, dispatch.waiting) == (2, 1)


def test_nothing_of_a_forgotten_group_is_sent_out_or_waited_for():
    dispatch = filled()
    dispatch.take(9)
    dispatch.forget(0)
    assert dispatch.out == 0
    assert dispatch.take(9) == Order(1, 0)
    dispatch.back(0, 0)
    assert (dispatch.out, dispatch.waiting) == (1, 1)


def test_the_limit_rises_while_the_engines_have_room_and_all_of_it_is_used():
    limit = Concurrency(4, 64, start=8)
    assert [limit.observe(Load(cache=0.3, queued=0), out=limit.limit) for _ in range(4)] == [9, 10, 11, 12]
    assert limit.observe(Load(cache=0.3, queued=0), out=5) == 12
    assert limit.observe(Load(cache=0.9, queued=0), out=12) == 12
    for _ in range(40):
        limit.observe(Load(cache=0.3, queued=0), out=limit.limit)
    assert limit.limit == 64


def test_the_limit_falls_when_the_cache_is_full_or_requests_queue():
    limit = Concurrency(4, 64)
    assert limit.observe(Load(cache=0.99, queued=0), out=64) == 48
    assert limit.observe(Load(cache=0.5, queued=20), out=48) == 36
    assert limit.observe(Load(cache=0.99, queued=0), out=16) == 12
    for _ in range(20):
        limit.observe(Load(cache=1.0, queued=9), out=limit.limit)
    assert limit.limit == 4


def test_the_limit_settles_where_the_engines_are_full():
    """An engine whose cache holds 40 rollouts: the limit stays near it, up from below and down from above."""
    for start in (4, 400):
        limit, seen = Concurrency(4, 400, start), []
        for _ in range(200):
            out = limit.limit
            seen.append(limit.observe(Load(min(1.0, out / 40), max(0, out - 40)), out))
        assert all(28 <= value <= 42 for value in seen[100:])
