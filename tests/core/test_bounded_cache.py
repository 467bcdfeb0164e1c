"""The cache of the last used values."""

import threading

import pytest

from ramify.core.bounded_cache import BoundedCache

DEADLINE = 20.0  # seconds


def test_the_least_recently_used_value_is_removed_and_discarded():
    discarded = []
    cache = BoundedCache[str, int](2, discard=discarded.append)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert (cache.get("b"), cache.get("a"), cache.get("c")) == (None, 1, 3)
    assert discarded == [2]
    cache.clear()
    assert discarded == [2, 1, 3]
    assert cache.get("a") is None


def test_a_replaced_value_is_discarded():
    discarded = []
    cache = BoundedCache[str, int](2, discard=discarded.append)
    cache.put("a", 1)
    cache.put("a", 2)
    assert (cache.get("a"), discarded) == (2, [1])


def test_a_missing_value_is_made_once():
    cache = BoundedCache[str, int](2)
    assert [cache.get_or_make("a", lambda: 7), cache.get_or_make("a", lambda: pytest.fail("made again"))] == [7, 7]


def test_nothing_is_kept_of_a_value_that_cannot_be_made():
    cache = BoundedCache[str, int](2)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_make("a", lambda: 1 // 0)
    assert cache.get_or_make("a", lambda: 7) == 7


def test_other_values_can_be_read_while_one_is_made():
    cache = BoundedCache[str, int](2)
    cache.put("b", 2)
    seen = []

    def read_other():
        thread = threading.Thread(target=lambda: seen.append(cache.get("b")))
        thread.start()
        thread.join(DEADLINE)
        return 1

    assert cache.get_or_make("a", read_other) == 1
    assert seen == [2]


def test_two_threads_that_make_a_value_get_the_same_one():
    discarded = []
    cache = BoundedCache[str, int](2, discard=discarded.append)

    def make():
        assert cache.get_or_make("a", lambda: 1) == 1  # as another thread does meanwhile
        return 2

    assert cache.get_or_make("a", make) == 1
    assert discarded == [2]


def test_values_are_removed_by_their_size():
    cache = BoundedCache[str, int](10, measure=lambda value: value)
    for key, size in (("a", 4), ("b", 5), ("a", 3), ("c", 2), ("d", 4)):
        cache.put(key, size)
    assert [cache.get(key) for key in "abcd"] == [3, None, 2, 4]
    cache.put("huge", 11)
    assert [cache.get(key) for key in ("a", "d", "huge")] == [None, None, 11], "the newest value stays"
    cache.clear()
    cache.put("e", 10)
    assert cache.get("e") == 10
