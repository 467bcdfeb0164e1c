"""Policy failures are results; system failures are retried, then dropped."""

import pytest

from ramify.core.errors import Failure
from ramify.orchestrate.group_tracker import AttemptOutcome, GroupProgress, GroupTracker
from tests.support.traces import make_trace

DIED = Failure("ProcessDied", "exit code -9", "system", True)
REFUSED = Failure("EngineIncompatible", "no token ids", "system", False)


def test_group_is_complete_when_all_attempts_returned():
    group = GroupTracker(0, 3)
    for attempt in (2, 0):
        assert group.record_episode(attempt, [make_trace(f"t{attempt}", 1.0)]) is AttemptOutcome.KEPT
        assert group.progress is GroupProgress.OPEN
    assert group.pending_attempts == [1]
    group.record_episode(1, [make_trace("t1", 0.0)])
    assert group.progress is GroupProgress.COMPLETE
    assert [trace.id for trace in group.traces] == ["t0", "t1", "t2"]


def test_policy_failure_is_a_result():
    group = GroupTracker(0, 1)
    assert group.record_episode(0, [make_trace("t", 0.0, failure="ContextOverflow")]) is AttemptOutcome.KEPT


@pytest.mark.parametrize(
    "traces",
    [
        [make_trace("t", 1.0, failure="ProviderError")],
        [make_trace("t", None)],
        [make_trace("a", 1.0, agent="a"), make_trace("b", None, agent="b")],
        [],
    ],
    ids=["failure", "reward", "one agent of two", "no traces"],
)
def test_system_failure_is_retried_and_then_dropped(traces):
    group = GroupTracker(0, 3, max_tries=3)
    assert [group.record_episode(1, traces) for _ in range(3)] == [
        AttemptOutcome.RETRY,
        AttemptOutcome.RETRY,
        AttemptOutcome.DROPPED,
    ]

    assert group.pending_attempts == [0, 2]
    group.record_episode(0, [make_trace("a", 1.0)])
    group.record_episode(2, [make_trace("b", 1.0)])
    assert group.progress is GroupProgress.COMPLETE
    assert [trace.id for trace in group.traces] == ["a", "b"]


def test_retry_may_succeed():
    group = GroupTracker(0, 1, max_tries=2)
    assert group.record_failure(0, DIED) is AttemptOutcome.RETRY
    assert group.record_episode(0, [make_trace("t", 1.0)]) is AttemptOutcome.KEPT
    assert group.progress is GroupProgress.COMPLETE


def test_permanent_failure_is_not_retried():
    group = GroupTracker(0, 3, max_tries=9)
    assert group.record_failure(0, REFUSED) is AttemptOutcome.DROPPED
    assert group.failed_attempts == {0: REFUSED.name}


def test_too_few_is_reported_as_soon_as_it_is_certain():
    group = GroupTracker(0, 4, max_tries=1, min_group_size=3)
    group.record_failure(0, DIED)
    assert group.progress is GroupProgress.OPEN
    group.record_failure(3, DIED)
    assert group.progress is GroupProgress.TOO_FEW
    assert group.pending_attempts == [1, 2]


def test_group_of_one_needs_one_attempt():
    group = GroupTracker(0, 1, min_group_size=2)
    group.record_episode(0, [make_trace("t", 1.0)])
    assert group.progress is GroupProgress.COMPLETE


def test_group_reward_may_be_missing():
    trace = make_trace("t", 1.0)
    trace.rewards["ranked"] = None
    assert GroupTracker(0, 1, group_rewards=frozenset({"ranked"})).record_episode(0, [trace]) is AttemptOutcome.KEPT
    assert GroupTracker(0, 1).record_episode(0, [trace]) is AttemptOutcome.RETRY


def test_restored_group_has_pending_attempts():
    group = GroupTracker(0, 4, max_tries=2)
    group.restore({1: [make_trace("t1", 1.0)]}, {3: DIED}, {0: 2})
    assert group.pending_attempts == [0, 2]
    assert group.record_failure(0, DIED) is AttemptOutcome.DROPPED
    assert group.record_failure(2, DIED) is AttemptOutcome.RETRY
    assert group.progress is GroupProgress.OPEN
