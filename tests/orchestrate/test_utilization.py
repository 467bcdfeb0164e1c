"""Utilization is the least time for a step's work over the time it took, or nothing."""

import pytest

from ramify.client.engine_load import EngineLoad, parse_load
from ramify.orchestrate.utilization import TrainedStep, UtilizationMeter

TRAINING = {"train/mfu": 0.4, "train/seconds": 0.5}  # 0.2 s at the peak


def measure(*reports: list[float | None], metrics=TRAINING) -> list[float | None]:
    meter = UtilizationMeter()
    steps = [TrainedStep(step, 2.0, metrics) for step in range(len(reports))]
    return [
        meter.measure(step, [EngineLoad(ideal_seconds=seconds) for seconds in report])
        for step, report in zip(steps, reports)
    ]


def test_sampling_and_training_add_up():
    assert measure([10.0], [10.6], [11.0]) == [None, pytest.approx(0.4), pytest.approx(0.3)]


def test_several_engines_count_by_their_mean():
    assert measure([1.0, 5.0], [1.4, 5.8])[1] == pytest.approx((0.6 + 0.2) / 2.0)


@pytest.mark.parametrize(
    "reports",
    [
        [[None], [None]],  # a CPU, or vLLM
        [[1.0, 2.0], [1.5, None]],
        [[], []],
        [[10.0], [0.5]],  # restarted
    ],
)
def test_unknown_work_is_left_out(reports):
    assert measure(*reports)[1] is None


def test_trainer_without_known_peaks_is_left_out():
    assert measure([1.0], [2.0], metrics={"train/seconds": 0.5}) == [None, None]


def test_ideal_seconds_are_parsed():
    assert parse_load("# TYPE ramify_ideal_seconds gauge\nramify_ideal_seconds 12.5\n").ideal_seconds == 12.5
    assert parse_load("ramify_running 3\n").ideal_seconds is None
