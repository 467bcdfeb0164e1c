"""Windowed FIFO: who may be issued, who is in the next batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.errors import TransitionRefused
from ramify.orchestrate.admission import Admission, Shape


@given(st.integers(1, 64), st.integers(1, 12))
def test_the_shape_has_as_many_slots_as_the_bound_allows(batch, bound):
    shape = Shape.of(batch, bound)
    assert shape.window == max(1, 3 * shape.slots // 10)
    assert shape.worst <= bound
    more = Shape(batch, shape.slots + 1, max(1, 3 * (shape.slots + 1) // 10))
    assert more.worst > bound
    assert shape.slots >= batch


@given(st.integers(1, 64))
def test_without_any_staleness_a_batch_is_sampled_and_trained_in_turns(batch):
    assert Shape.of(batch, 0) == Shape(batch, slots=batch, window=1)
    assert Shape.of(batch, 0).worst == 0


def filled(shape: Shape, groups: int, **more) -> Admission:
    admission = Admission(shape, **more)
    for group in range(groups):
        admission.issue(group)
    return admission


def test_groups_are_issued_while_there_are_slots():
    admission = filled(Shape(2, slots=5, window=1), 5)
    assert admission.room == 0
    with pytest.raises(TransitionRefused, match="5 of 5 slots held"):
        admission.issue(5)
    admission.drop(3)
    assert admission.room == 1


def test_a_slot_is_held_until_the_version_its_batch_made_is_applied():
    admission = filled(Shape(2, slots=4, window=1), 4)
    for group in (0, 1):
        admission.score(group)
    assert admission.cut(admission.ready()) == 0
    assert admission.room == 0
    admission.apply(1)
    assert admission.room == 2


def test_a_batch_waits_for_the_oldest_group_when_the_window_is_one():
    admission = filled(Shape(2, slots=6, window=1), 6)
    for group in (1, 2, 3, 4, 5):
        admission.score(group)
    assert admission.ready() is None
    assert admission.waiting_for() == [0]
    admission.score(0)
    assert admission.ready() == (0, 1)


def test_groups_of_the_window_overtake_a_slow_one_and_no_others():
    admission = filled(Shape(2, slots=10, window=4), 10)
    for group in (3, 4, 5):
        admission.score(group)
    assert admission.ready() is None  # group 0 may be overtaken by 1, 2 and 3 alone
    admission.score(1)
    assert admission.ready() == (1, 3)
    admission.cut((1, 3))
    admission.score(2)
    assert admission.ready() is None
    admission.score(0)
    assert admission.ready() == (0, 2)  # the oldest first, and 4 and 5 after them
    admission.cut((0, 2))
    assert admission.ready() == (4, 5)


def test_a_dropped_group_holds_nobody_up():
    admission = filled(Shape(2, slots=6, window=1), 6)
    for group in (1, 2):
        admission.score(group)
    admission.drop(0)
    assert admission.ready() == (1, 2)
    admission.drop(1)
    assert admission.ready() is None


def test_the_last_batch_is_short_when_the_tasks_end():
    admission = filled(Shape(3, slots=6, window=2), 4)
    admission.exhausted = True
    for group in (3, 1, 2, 0):
        assert admission.ready() is None
        admission.score(group)
    admission.cut(admission.ready())
    assert not admission.finished
    assert admission.ready() == (3,)
    admission.cut((3,))
    assert admission.finished
    assert admission.room == 0


def test_no_more_is_issued_than_the_last_step_needs():
    admission = filled(Shape(2, slots=9, window=2), 4, last_step=2)
    assert admission.room == 0
    admission.drop(2)
    assert admission.room == 1
    admission.issue(4)
    for group in (0, 1, 3, 4):
        admission.score(group)
    admission.cut(admission.ready())
    admission.cut(admission.ready())
    assert admission.finished
    assert admission.ready() is None


def test_an_event_that_cannot_be_is_refused():
    admission = filled(Shape(2, slots=5, window=1), 2)
    admission.score(0)
    for event in (lambda: admission.score(0), lambda: admission.score(9), lambda: admission.drop(9)):
        with pytest.raises(TransitionRefused, match="does not wait for that"):
            event()


def test_after_a_restart_a_group_is_not_sampled_until_the_trainer_has_caught_up():
    admission = filled(Shape(2, slots=4, window=1), 4)
    batches = {}
    for step in range(3):
        for group in (2 * step, 2 * step + 1):
            admission.score(group)
        batches[step] = admission.ready()
        admission.cut(batches[step])
        admission.apply(step + 1)
        while admission.room:
            admission.issue(len(batches) * 2 + 4 - admission.room)
    assert admission.active == 4
    admission.go_back(1, {step: groups for step, groups in batches.items() if step >= 1})
    assert admission.active == 8
    assert admission.room == 0
    assert not any(map(admission.may_dispatch, range(6, 10)))
    admission.apply(2)
    assert [group for group in range(6, 10) if admission.may_dispatch(group)] == [6, 7]
    admission.apply(3)
    assert all(map(admission.may_dispatch, range(6, 10)))
    assert admission.step == 3


def test_more_groups_than_slots_go_out_as_slots_are_free_the_oldest_first():
    admission = Admission(Shape(2, slots=2, window=1))
    for group in range(5):
        admission.resume(group)  # of a run that had more slots
    assert [group for group in range(5) if admission.may_dispatch(group)] == [0, 1]
    for group in (0, 1):
        admission.score(group)
    assert not admission.may_dispatch(2)
    admission.cut(admission.ready())
    assert not admission.may_dispatch(2)
    admission.apply(1)
    assert [group for group in range(2, 5) if admission.may_dispatch(group)] == [2, 3]
