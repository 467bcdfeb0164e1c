"""Utilization is the least time for a step's work over the time it took, or nothing."""

import pytest

from ramify.infer.client.replica import EngineLoad, parse_load
from ramify.orchestrate.progress import TrainedStep, UtilizationMeter

TRAINING = {"train/mfu": 0.4, "train/seconds": 0.5}  # 0.2 s at the peak


def measure(*reports: list[float | None] | dict[str, float | None], metrics=TRAINING) -> list[float | None]:
    """Return the utilization of each step, given the totals of the engines, by URL or in a fixed order."""
    meter = UtilizationMeter()
    utilization = []
    for step, report in enumerate(reports):
        totals = report if isinstance(report, dict) else {f"http://{n}": total for n, total in enumerate(report)}
        loads = {url: EngineLoad(ideal_seconds=total) for url, total in totals.items()}
        utilization.append(meter.measure(TrainedStep(step, 2.0, metrics), loads))
    return utilization


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
        [[10.0, 10.0], [10.4, 0.5]],  # one of two was restarted
        [{"a": 1.0, "b": 9.0}, {"b": 9.5}],  # an engine did not answer
        [{"a": 1.0}, {"a": 1.5, "b": 9.0}],
        [{"a": 1.0}, {"b": 9.0}],
    ],
)
def test_unknown_work_is_left_out(reports):
    assert measure(*reports)[1] is None


def test_trainer_without_known_peaks_is_left_out():
    assert measure([1.0], [2.0], metrics={"train/seconds": 0.5}) == [None, None]


def test_ideal_seconds_are_parsed():
    assert parse_load("# TYPE ramify_ideal_seconds gauge\nramify_ideal_seconds 12.5\n").ideal_seconds == 12.5
    assert parse_load("ramify_running 3\n").ideal_seconds is None
