"""Windowed FIFO admission: which groups may be issued, and which form the next batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import OperationInvalid
from ramify.orchestrate.admission import AdmissionControl, AdmissionLimits


@given(st.integers(1, 64), st.integers(1, 12))
def test_limits_have_the_most_slots_that_the_bound_allows(batch, bound):
    limits = AdmissionLimits.from_max_staleness(batch, bound)
    assert limits.window == (max(1, 3 * limits.slots // 10) if bound > 1 else 1)
    assert limits.max_staleness <= bound
    more = AdmissionLimits(batch, limits.slots + 1, max(1, 3 * (limits.slots + 1) // 10))
    assert more.max_staleness > bound


@given(st.integers(1, 64), st.integers(1, 12))
def test_one_batch_can_be_sampled_while_another_is_trained(batch, bound):
    assert AdmissionLimits.from_max_staleness(batch, bound).slots >= 2 * batch


@given(st.integers(1, 64))
def test_zero_staleness_alternates_sampling_and_training(batch):
    assert AdmissionLimits.from_max_staleness(batch, 0) == AdmissionLimits(batch, slots=batch, window=1)
    assert AdmissionLimits.from_max_staleness(batch, 0).max_staleness == 0


def issue_groups(limits: AdmissionLimits, groups: int, max_steps: int = 100) -> AdmissionControl:
    admission = AdmissionControl(limits, max_steps)
    for group in range(groups):
        admission.issue_group(group)
    return admission


def test_groups_are_issued_while_slots_are_free():
    admission = issue_groups(AdmissionLimits(2, slots=5, window=1), 5)
    assert admission.num_free_slots == 0
    with pytest.raises(OperationInvalid, match="5 of 5 slots held"):
        admission.issue_group(5)
    admission.drop_group(3)
    assert admission.num_free_slots == 1


def test_slot_is_held_until_the_version_of_its_batch_is_applied():
    admission = issue_groups(AdmissionLimits(2, slots=4, window=1), 4)
    for group in (0, 1):
        admission.mark_scored(group)
    assert admission.record_batch(admission.next_batch()) == 0
    assert admission.num_free_slots == 0
    admission.apply_version(1)
    assert admission.num_free_slots == 2


def test_window_of_one_waits_for_the_oldest_group():
    admission = issue_groups(AdmissionLimits(2, slots=6, window=1), 6)
    for group in (1, 2, 3, 4, 5):
        admission.mark_scored(group)
    assert admission.next_batch() is None
    assert admission.get_blocking_groups() == [0]
    admission.mark_scored(0)
    assert admission.next_batch() == (0, 1)


def test_only_groups_in_the_window_overtake_a_slow_group():
    admission = issue_groups(AdmissionLimits(2, slots=10, window=4), 10)
    for group in (3, 4, 5):
        admission.mark_scored(group)
    assert admission.next_batch() is None  # group 0 may be overtaken by 1, 2 and 3 alone
    admission.mark_scored(1)
    assert admission.next_batch() == (1, 3)
    admission.record_batch((1, 3))
    admission.mark_scored(2)
    assert admission.next_batch() is None
    admission.mark_scored(0)
    assert admission.next_batch() == (0, 2)  # the oldest first, and 4 and 5 after them
    admission.record_batch((0, 2))
    assert admission.next_batch() == (4, 5)


def test_last_batch_is_smaller_when_tasks_run_out():
    admission = issue_groups(AdmissionLimits(3, slots=6, window=2), 4)
    admission.exhausted = True
    for group in (3, 1, 2, 0):
        assert admission.next_batch() is None
        admission.mark_scored(group)
    admission.record_batch(admission.next_batch())
    assert not admission.is_finished
    assert admission.next_batch() == (3,)
    admission.record_batch((3,))
    assert admission.is_finished
    assert admission.num_free_slots == 0


def test_no_more_groups_are_issued_than_the_last_step_needs():
    admission = issue_groups(AdmissionLimits(2, slots=9, window=2), 4, max_steps=2)
    assert admission.num_free_slots == 0
    admission.drop_group(2)
    assert admission.num_free_slots == 1
    admission.issue_group(4)
    for group in (0, 1, 3, 4):
        admission.mark_scored(group)
    admission.record_batch(admission.next_batch())
    admission.record_batch(admission.next_batch())
    assert admission.is_finished
    assert admission.next_batch() is None


def test_illegal_transitions_are_refused():
    admission = issue_groups(AdmissionLimits(2, slots=5, window=1), 2)
    admission.mark_scored(0)
    for event in (lambda: admission.mark_scored(0), lambda: admission.mark_scored(9), lambda: admission.drop_group(9)):
        with pytest.raises(OperationInvalid, match="not in a state that allows it"):
            event()


def test_after_a_rewind_groups_wait_until_the_trainer_has_caught_up():
    admission = issue_groups(AdmissionLimits(2, slots=4, window=1), 4)
    batches = {}
    for step in range(3):
        for group in (2 * step, 2 * step + 1):
            admission.mark_scored(group)
        batches[step] = admission.next_batch()
        admission.record_batch(batches[step])
        admission.apply_version(step + 1)
        while admission.num_free_slots:
            admission.issue_group(len(batches) * 2 + 4 - admission.num_free_slots)
    assert admission.num_active == 4
    admission.rewind(1, {step: groups for step, groups in batches.items() if step >= 1})
    assert admission.num_active == 8
    assert admission.num_free_slots == 0
    assert not any(map(admission.can_dispatch, range(6, 10)))
    admission.apply_version(2)
    assert [group for group in range(6, 10) if admission.can_dispatch(group)] == [6, 7]
    admission.apply_version(3)
    assert all(map(admission.can_dispatch, range(6, 10)))
    assert admission.next_step == 3


def test_surplus_groups_are_dispatched_oldest_first_as_slots_become_free():
    admission = AdmissionControl(AdmissionLimits(2, slots=2, window=1), 100)
    for group in range(5):
        admission.restore_group(group)  # the run had more slots before
    assert [group for group in range(5) if admission.can_dispatch(group)] == [0, 1]
    for group in (0, 1):
        admission.mark_scored(group)
    assert not admission.can_dispatch(2)
    admission.record_batch(admission.next_batch())
    assert not admission.can_dispatch(2)
    admission.apply_version(1)
    assert [group for group in range(2, 5) if admission.can_dispatch(group)] == [2, 3]
