"""Windowed FIFO: who may be issued, who is in the next batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.errors import TransitionRefused
from ramify.orchestrate.admission import AdmissionControl, AdmissionLimits


@given(st.integers(1, 64), st.integers(1, 12))
def test_the_shape_has_as_many_slots_as_the_bound_allows(batch, bound):
    shape = AdmissionLimits.from_max_staleness(batch, bound)
    assert shape.window == max(1, 3 * shape.slots // 10)
    assert shape.max_staleness <= bound
    more = AdmissionLimits(batch, shape.slots + 1, max(1, 3 * (shape.slots + 1) // 10))
    assert more.max_staleness > bound
    assert shape.slots >= batch


@given(st.integers(1, 64))
def test_without_any_staleness_a_batch_is_sampled_and_trained_in_turns(batch):
    assert AdmissionLimits.from_max_staleness(batch, 0) == AdmissionLimits(batch, slots=batch, window=1)
    assert AdmissionLimits.from_max_staleness(batch, 0).max_staleness == 0


def filled(shape: AdmissionLimits, groups: int, **more) -> AdmissionControl:
    admission = AdmissionControl(shape, **more)
    for group in range(groups):
        admission.issue_group(group)
    return admission


def test_groups_are_issued_while_there_are_slots():
    admission = filled(AdmissionLimits(2, slots=5, window=1), 5)
    assert admission.num_free_slots == 0
    with pytest.raises(TransitionRefused, match="5 of 5 slots held"):
        admission.issue_group(5)
    admission.drop_group(3)
    assert admission.num_free_slots == 1


def test_a_slot_is_held_until_the_version_its_batch_made_is_applied():
    admission = filled(AdmissionLimits(2, slots=4, window=1), 4)
    for group in (0, 1):
        admission.mark_scored(group)
    assert admission.record_batch(admission.next_batch()) == 0
    assert admission.num_free_slots == 0
    admission.apply_version(1)
    assert admission.num_free_slots == 2


def test_a_batch_waits_for_the_oldest_group_when_the_window_is_one():
    admission = filled(AdmissionLimits(2, slots=6, window=1), 6)
    for group in (1, 2, 3, 4, 5):
        admission.mark_scored(group)
    assert admission.next_batch() is None
    assert admission.get_blocking_groups() == [0]
    admission.mark_scored(0)
    assert admission.next_batch() == (0, 1)


def test_groups_of_the_window_overtake_a_slow_one_and_no_others():
    admission = filled(AdmissionLimits(2, slots=10, window=4), 10)
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


def test_a_dropped_group_holds_nobody_up():
    admission = filled(AdmissionLimits(2, slots=6, window=1), 6)
    for group in (1, 2):
        admission.mark_scored(group)
    admission.drop_group(0)
    assert admission.next_batch() == (1, 2)
    admission.drop_group(1)
    assert admission.next_batch() is None


def test_the_last_batch_is_short_when_the_tasks_end():
    admission = filled(AdmissionLimits(3, slots=6, window=2), 4)
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


def test_no_more_is_issued_than_the_last_step_needs():
    admission = filled(AdmissionLimits(2, slots=9, window=2), 4, last_step=2)
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


def test_an_event_that_cannot_be_is_refused():
    admission = filled(AdmissionLimits(2, slots=5, window=1), 2)
    admission.mark_scored(0)
    for event in (lambda: admission.mark_scored(0), lambda: admission.mark_scored(9), lambda: admission.drop_group(9)):
        with pytest.raises(TransitionRefused, match="does not wait for that"):
            event()


def test_after_a_restart_a_group_is_not_sampled_until_the_trainer_has_caught_up():
    admission = filled(AdmissionLimits(2, slots=4, window=1), 4)
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


def test_more_groups_than_slots_go_out_as_slots_are_free_the_oldest_first():
    admission = AdmissionControl(AdmissionLimits(2, slots=2, window=1))
    for group in range(5):
        admission.restore_group(group)  # of a run that had more slots
    assert [group for group in range(5) if admission.can_dispatch(group)] == [0, 1]
    for group in (0, 1):
        admission.mark_scored(group)
    assert not admission.can_dispatch(2)
    admission.record_batch(admission.next_batch())
    assert not admission.can_dispatch(2)
    admission.apply_version(1)
    assert [group for group in range(2, 5) if admission.can_dispatch(group)] == [2, 3]
