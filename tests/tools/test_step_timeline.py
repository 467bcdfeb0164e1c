"""The parts of a step in the benchmark of RL add up, and gaps are what neither sampling nor training covers."""

from typing import Any

import pytest

ACTIVITIES = ("sampling", "training", "swap", "idle")


@pytest.fixture
def rl_gpu(load_benchmark) -> Any:
    return load_benchmark("rl_gpu")


def _make_step(seconds: float, *parts: float) -> dict[str, float]:
    return {"time/step": seconds, **{f"time/engine/{name}": part for name, part in zip(ACTIVITIES, parts)}}


def test_parts_are_means_over_the_later_half_of_the_steps_that_have_all_of_them(rl_gpu):
    metrics_by_step = {
        0: {"reward/all/mean": 0.0},
        1: _make_step(9.0, 8.0, 0.5, 0.25, 0.25),
        2: _make_step(9.0, 8.0, 0.5, 0.25, 0.25),
        3: _make_step(1.0, 0.5, 0.375, 0.0625, 0.0625),
        4: _make_step(2.0, 1.0, 0.875, 0.0625, 0.0625),
        5: {"time/step": 50.0},  # the run ended before the engines were asked
    }
    rows = {row.name.strip(): row for row in rl_gpu.build_timeline_rows(metrics_by_step)}
    parts = [rows[f"engine: {name}"].ours for name in ACTIVITIES]
    assert parts == [0.75, 0.625, 0.0625, 0.0625]
    assert (rows["sum of the four"].ours, rows["sum of the four"].reference) == (sum(parts), 1.5)
    assert rows["gaps"].ours == pytest.approx(100 * 0.125 / 1.5)
    assert all(row.met for row in rows.values())


def test_parts_that_do_not_add_up_miss_a_target(rl_gpu):
    rows = rl_gpu.build_timeline_rows({step: _make_step(4.78, 2.2, 2.8, 0.11, 0.03) for step in range(4)})
    assert [row.name.strip() for row in rows if not row.met] == ["difference of their sum from the step"]


def test_time_that_no_part_covers_is_a_gap(rl_gpu):
    rows = rl_gpu.build_timeline_rows({step: _make_step(2.0, 1.0, 0.5, 0.0, 0.0) for step in range(4)})
    assert rows[-1].name == "gaps" and rows[-1].ours == pytest.approx(25.0)


def test_a_run_without_engine_times_has_no_timeline(rl_gpu):
    assert rl_gpu.build_timeline_rows({step: {"time/step": 1.0} for step in range(4)}) == []


@pytest.mark.parametrize(("gaps", "is_met"), [(8.0, True), (8.1, False)])
def test_gaps_of_the_small_model_have_a_target(rl_gpu, gaps, is_met):
    rows = rl_gpu.set_targets([rl_gpu.Row("gaps", gaps, None, "%")], "0.5b", 1, None)
    assert [row.met for row in rows if row.name.endswith("gaps")] == [is_met]
    assert rl_gpu.set_targets([rl_gpu.Row("gaps", gaps, None, "%")], "0.5b", 0, None)[0].met


def test_a_target_that_was_not_measured_is_missed(rl_gpu):
    rows = rl_gpu.set_targets([rl_gpu.Row("a step", 0.5, None, "s")], "0.5b", 1, None)
    assert [row.name for row in rows if not row.met] == ["max_staleness 1: gaps"]
