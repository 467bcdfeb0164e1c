"""Whose fault it was decides: the policy's failures are results, the system's are run again, then left out."""

import pytest

from ramify.errors import Failure
from ramify.orchestrate.group_tracker import AttemptOutcome, GroupProgress, GroupTracker
from tests.orchestrate.rollouts import rollout

DIED = Failure("WorkerDied", "exit code -9", "system", True)
REFUSED = Failure("TokensRequired", "no token ids", "system", False)


def test_a_group_is_complete_when_all_attempts_are_back():
    group = GroupTracker(0, 3)
    for attempt in (2, 0):
        assert group.record_episode(attempt, [rollout(f"t{attempt}", 1.0)]) is AttemptOutcome.KEPT
        assert group.progress is GroupProgress.OPEN
    assert group.pending_attempts == [1]
    group.record_episode(1, [rollout("t1", 0.0)])
    assert group.progress is GroupProgress.COMPLETE
    assert [trace.id for trace in group.traces] == ["t0", "t1", "t2"]


def test_what_the_policy_did_wrong_is_a_result():
    group = GroupTracker(0, 1)
    assert group.record_episode(0, [rollout("t", 0.0, failure="ContextOverflow")]) is AttemptOutcome.KEPT


@pytest.mark.parametrize(
    "trace", [rollout("t", 1.0, failure="ProviderError"), rollout("t", None)], ids=["failure", "reward"]
)
def test_what_the_system_did_is_run_again_and_then_leaves(trace):
    group = GroupTracker(0, 3, max_tries=3)
    assert [group.record_episode(1, [trace]) for _ in range(3)] == [
        AttemptOutcome.RETRY,
        AttemptOutcome.RETRY,
        AttemptOutcome.DROPPED,
    ]
    assert group.get_num_tries(1) == 3
    assert group.pending_attempts == [0, 2]
    group.record_episode(0, [rollout("a", 1.0)])
    group.record_episode(2, [rollout("b", 1.0)])
    assert group.progress is GroupProgress.COMPLETE
    assert [trace.id for trace in group.traces] == ["a", "b"]


def test_an_attempt_may_succeed_the_second_time():
    group = GroupTracker(0, 1, max_tries=2)
    assert group.record_failure(0, DIED) is AttemptOutcome.RETRY
    assert group.record_episode(0, [rollout("t", 1.0)]) is AttemptOutcome.KEPT
    assert group.progress is GroupProgress.COMPLETE


def test_what_cannot_pass_is_not_run_again():
    group = GroupTracker(0, 3, max_tries=9)
    assert group.record_failure(0, REFUSED) is AttemptOutcome.DROPPED
    assert group.failed_attempts == {0: REFUSED}


def test_a_group_with_too_few_left_is_lost_as_soon_as_that_is_certain():
    group = GroupTracker(0, 4, max_tries=1, min_group=3)
    group.record_failure(0, DIED)
    assert group.progress is GroupProgress.OPEN
    group.record_failure(3, DIED)
    assert group.progress is GroupProgress.TOO_FEW
    assert group.pending_attempts == [1, 2]


def test_a_group_of_one_needs_one():
    group = GroupTracker(0, 1, min_group=2)
    group.record_episode(0, [rollout("t", 1.0)])
    assert group.progress is GroupProgress.COMPLETE


def test_a_reward_of_the_whole_group_may_still_be_due():
    trace = rollout("t", 1.0)
    trace.rewards["ranked"] = None
    assert GroupTracker(0, 1, group_rewards=frozenset({"ranked"})).record_episode(0, [trace]) is AttemptOutcome.KEPT
    assert GroupTracker(0, 1).record_episode(0, [trace]) is AttemptOutcome.RETRY


def test_an_agent_whose_partner_failed_is_run_again_with_it():
    group = GroupTracker(0, 1)
    assert (
        group.record_episode(0, [rollout("a", 1.0, agent="a"), rollout("b", None, agent="b")]) is AttemptOutcome.RETRY
    )


def test_an_episode_without_a_trace_says_nothing():
    assert GroupTracker(0, 1).record_episode(0, []) is AttemptOutcome.RETRY


def test_a_group_goes_on_with_the_attempts_that_are_missing():
    group = GroupTracker(0, 4, max_tries=2)
    group.restore({1: [rollout("t1", 1.0)]}, {3: DIED}, {0: 2})
    assert group.pending_attempts == [0, 2]
    assert group.record_failure(0, DIED) is AttemptOutcome.DROPPED
    assert group.record_failure(2, DIED) is AttemptOutcome.RETRY
    assert group.progress is GroupProgress.OPEN
