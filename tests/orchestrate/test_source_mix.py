"""Sources keep their weights, and a resumed run makes the choices it would have made."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import ConfigInvalid
from ramify.orchestrate.curriculum import (
    DifficultyConfig,
    DifficultyCurriculum,
    ShuffleConfig,
    ShuffleCurriculum,
    SourceMix,
    build_curriculum,
)


def round_trip(state):
    """Encode and decode a state as the ledger does."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state))


def build_read_state(states):
    """Return a `read_state` callback over stored states."""
    return lambda prefix: {name.removeprefix(prefix): states[name] for name in states if name.startswith(prefix)}


def shuffle(tasks, seed="0", **more) -> ShuffleCurriculum:
    return ShuffleCurriculum(ShuffleConfig(**more), tasks, seed)


@given(st.integers(1, 30), st.integers(1, 4), st.text(max_size=3))
def test_every_task_is_chosen_once_per_epoch(tasks, epochs, seed):
    curriculum = shuffle(tasks, seed, epochs=epochs)
    picks = [curriculum.next_task() for _ in range(tasks * epochs)]
    assert curriculum.next_task() is None
    for epoch in range(epochs):
        assert sorted(pick.task for pick in picks if pick.epoch == epoch) == list(range(tasks))


def test_order_depends_on_epoch_and_seed():
    def orders(seed):
        curriculum = shuffle(20, seed)
        return [[curriculum.next_task().task for _ in range(20)] for _ in range(2)]

    assert orders("1") == orders("1")
    assert orders("1")[0] != orders("1")[1]
    assert orders("1") != orders("2")


def test_unbounded_source_is_taken_in_order():
    curriculum = shuffle(None)
    assert [curriculum.next_task() for _ in range(3)] == [(0, 0), (1, 0), (2, 0)]


@given(st.integers(0, 20))
def test_started_epoch_keeps_its_order_when_the_seed_changes(before):
    first, resumed, picks = shuffle(7, "0"), shuffle(7, "1"), []
    for _ in range(before):
        picks.append(first.next_task())
    resumed.restore(round_trip(first.take_changes()))
    picks += [resumed.next_task() for _ in range(28 - before)]
    for epoch in range(4):
        assert sorted(pick.task for pick in picks if pick.epoch == epoch) == list(range(7))


def test_ratio_holds_at_every_moment():
    mix = SourceMix({"often": 3.0, "seldom": 1.0}, {"often": shuffle(50), "seldom": shuffle(50)})
    chosen = [mix.next_task().source for _ in range(2000)]
    assert abs(chosen.count("often") / 2000 - 0.75) <= 0.02 * 0.75
    for end in range(4, 2000, 4):
        assert abs(chosen[:end].count("often") - 0.75 * end) <= 1


def test_exhausted_source_is_skipped():
    mix = SourceMix({"a": 1, "b": 1}, {"a": shuffle(2, epochs=1), "b": shuffle(3, epochs=2)})
    chosen = [choice.source for choice in iter(mix.next_task, None)]
    assert (chosen.count("a"), chosen.count("b")) == (2, 6)


@given(st.integers(0, 30))
def test_mix_resumes_at_its_position(before):
    def make():
        curriculum = DifficultyCurriculum(DifficultyConfig(recent_groups=2), 6, "7")
        return SourceMix({"a": 2, "b": 1, "p": 1}, {"a": shuffle(4), "b": shuffle(3), "p": curriculum})

    first, resumed, states = make(), make(), {}
    for number in range(before):
        choice = first.next_task()
        states |= round_trip(choice.state_updates)
        states |= round_trip(first.record_reward(choice.source, choice.task, (number % 3) / 2))
    resumed.restore(build_read_state(states))
    for number in range(30):
        choice = first.next_task()
        assert choice == resumed.next_task()
        assert first.record_reward(choice.source, choice.task, number % 2) == resumed.record_reward(
            choice.source, choice.task, number % 2
        )


def test_difficulty_curriculum_draws_tasks_by_recent_rewards():
    curriculum = DifficultyCurriculum(DifficultyConfig(easy_fraction=0.1, hard_fraction=0.2, recent_groups=2), 30, "3")
    for task in range(10):
        curriculum.record_reward(task, 1.0)
        curriculum.record_reward(10 + task, 0.0)
        curriculum.record_reward(20 + task, 0.5)
    drawn = [curriculum.next_task().task // 10 for _ in range(2000)]
    assert [pytest.approx(drawn.count(kind) / 2000, abs=0.03) for kind in range(3)] == [0.1, 0.2, 0.7]
    assert curriculum.get_difficulty(0) == "easy"
    curriculum.record_reward(0, 0.5)
    assert curriculum.get_difficulty(0) == "normal"  # 0.75 over the last two
    curriculum.record_reward(0, 0.0)
    curriculum.record_reward(0, 0.0)
    assert curriculum.get_difficulty(0) == "hard"


def test_difficulty_without_tasks_is_skipped():
    curriculum = DifficultyCurriculum(DifficultyConfig(easy_fraction=1.0, hard_fraction=0.0), 5, "0")
    assert {curriculum.next_task().task for _ in range(100)} == set(range(5))


def test_difficulty_curriculum_needs_a_bounded_source():
    with pytest.raises(ConfigInvalid, match="bounded"):
        build_curriculum(DifficultyConfig(), None, "0")


def test_difficulty_curriculum_resumes_without_removed_tasks():
    before = DifficultyCurriculum(DifficultyConfig(), 6, "7")
    for task in range(6):
        before.record_reward(task, 1.0)
    after = DifficultyCurriculum(DifficultyConfig(), 4, "7")
    after.restore(before.take_changes())
    after.record_reward(5, 0.0)
    assert [after.get_difficulty(task) for task in range(4)] == ["easy"] * 4
    assert {after.next_task().task for _ in range(100)} == {0, 1, 2, 3}
