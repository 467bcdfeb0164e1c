"""Whose fault it was decides: the policy's failures are results, the system's are run again, then left out."""

import pytest

from ramify.errors import Failure
from ramify.orchestrate.groups import Fate, GroupRun, Standing
from tests.orchestrate.rollouts import rollout

DIED = Failure("WorkerDied", "exit code -9", "system", True)
REFUSED = Failure("TokensRequired", "no token ids", "system", False)


def test_a_group_is_complete_when_all_attempts_are_back():
    group = GroupRun(0, 3)
    for attempt in (2, 0):
        assert group.back(attempt, [rollout(f"t{attempt}", 1.0)]) is Fate.KEPT
        assert group.standing is Standing.OPEN
    assert group.missing == [1]
    group.back(1, [rollout("t1", 0.0)])
    assert group.standing is Standing.COMPLETE
    assert [trace.id for trace in group.traces] == ["t0", "t1", "t2"]


def test_what_the_policy_did_wrong_is_a_result():
    group = GroupRun(0, 1)
    assert group.back(0, [rollout("t", 0.0, failure="ContextOverflow")]) is Fate.KEPT


@pytest.mark.parametrize(
    "trace", [rollout("t", 1.0, failure="ProviderError"), rollout("t", None)], ids=["failure", "reward"]
)
def test_what_the_system_did_is_run_again_and_then_leaves(trace):
    group = GroupRun(0, 3, tries=3)
    assert [group.back(1, [trace]) for _ in range(3)] == [Fate.AGAIN, Fate.AGAIN, Fate.LOST]
    assert group.runs(1) == 3
    assert group.missing == [0, 2]
    group.back(0, [rollout("a", 1.0)])
    group.back(2, [rollout("b", 1.0)])
    assert group.standing is Standing.COMPLETE
    assert [trace.id for trace in group.traces] == ["a", "b"]


def test_an_attempt_may_succeed_the_second_time():
    group = GroupRun(0, 1, tries=2)
    assert group.failed(0, DIED) is Fate.AGAIN
    assert group.back(0, [rollout("t", 1.0)]) is Fate.KEPT
    assert group.standing is Standing.COMPLETE


def test_what_cannot_pass_is_not_run_again():
    group = GroupRun(0, 3, tries=9)
    assert group.failed(0, REFUSED) is Fate.LOST
    assert group.lost == {0: REFUSED}


def test_a_group_with_too_few_left_is_lost_as_soon_as_that_is_certain():
    group = GroupRun(0, 4, tries=1, min_group=3)
    group.failed(0, DIED)
    assert group.standing is Standing.OPEN
    group.failed(3, DIED)
    assert group.standing is Standing.TOO_FEW
    assert group.missing == [1, 2]


def test_a_group_of_one_needs_one():
    group = GroupRun(0, 1, min_group=2)
    group.back(0, [rollout("t", 1.0)])
    assert group.standing is Standing.COMPLETE


def test_a_reward_of_the_whole_group_may_still_be_due():
    trace = rollout("t", 1.0)
    trace.rewards["ranked"] = None
    assert GroupRun(0, 1, group_rewards=frozenset({"ranked"})).back(0, [trace]) is Fate.KEPT
    assert GroupRun(0, 1).back(0, [trace]) is Fate.AGAIN


def test_an_agent_whose_partner_failed_is_run_again_with_it():
    group = GroupRun(0, 1)
    assert group.back(0, [rollout("a", 1.0, agent="a"), rollout("b", None, agent="b")]) is Fate.AGAIN


def test_an_episode_without_a_trace_says_nothing():
    assert GroupRun(0, 1).back(0, []) is Fate.AGAIN


def test_a_group_goes_on_with_the_attempts_that_are_missing():
    group = GroupRun(0, 4, tries=2)
    group.restore({1: [rollout("t1", 1.0)]}, {3: DIED}, {0: 2})
    assert group.missing == [0, 2]
    assert group.failed(0, DIED) is Fate.LOST
    assert group.failed(2, DIED) is Fate.AGAIN
    assert group.standing is Standing.OPEN
