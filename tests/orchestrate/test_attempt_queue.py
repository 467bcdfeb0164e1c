"""Attempts are dispatched retries first, then in the order of issue."""

from ramify.orchestrate.group_tracker import AttemptQueue, QueuedAttempt


def filled() -> AttemptQueue:
    queue = AttemptQueue()
    for group in (1, 0):
        for attempt in range(2):
            queue.push(group, attempt)
    return queue


def test_retries_are_popped_first():
    queue = filled()
    queue.push(7, 3, is_retry=True)
    assert queue.pop(9) == QueuedAttempt(7, 3)


def test_limit_of_attempts_in_flight():
    queue = filled()
    assert [queue.pop(2) for _ in range(3)] == [QueuedAttempt(0, 0), QueuedAttempt(0, 1), None]
    queue.mark_done(0, 0)
    assert queue.pop(2) == QueuedAttempt(1, 0)
    assert (queue.num_in_flight, queue.num_waiting) == (2, 1)


def test_removed_group_has_no_attempts():
    queue = filled()
    queue.pop(9)
    queue.remove_group(0)
    assert queue.num_in_flight == 0
    assert queue.pop(9) == QueuedAttempt(1, 0)
    queue.mark_done(0, 0)
    assert (queue.num_in_flight, queue.num_waiting) == (1, 1)
