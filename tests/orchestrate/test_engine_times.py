"""What engines do during a step adds up; utilization is the least time for a step's work over the time it took."""

import pytest

from ramify.infer.client.replica import EngineLoad, parse_load
from ramify.infer.metrics import EngineCounters
from ramify.orchestrate.progress import EngineTimeMeter, TrainedStep

TRAINING = {"train/mfu": 0.4, "train/seconds": 0.5}  # 0.2 s at the peak


def measure(*reports: list[float | None] | dict[str, float | None], metrics=TRAINING) -> list[float | None]:
    """Return the utilization of each step, given the totals of the engines, by URL or in a fixed order."""
    meter = EngineTimeMeter()
    utilization = []
    for step, report in enumerate(reports):
        totals = report if isinstance(report, dict) else {f"http://{n}": total for n, total in enumerate(report)}
        loads = {url: EngineLoad(seconds={} if total is None else {"ideal": total}) for url, total in totals.items()}
        utilization.append(meter.measure(TrainedStep(step, 2.0, metrics), loads).get("utilization"))
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


def test_seconds_are_parsed():
    counters = EngineCounters(sampling_seconds=3.0, training_seconds=1.0)
    seconds = parse_load(counters.to_prometheus({"ideal_seconds": 12.5})).seconds
    assert seconds == {"sampling": 3.0, "training": 1.0, "swap": 0.0, "idle": 0.0, "ideal": 12.5}
    assert parse_load("ramify_running 3\n").seconds == {}


def test_activities_of_engines_are_means():
    meter = EngineTimeMeter()
    before, after = (
        {"a": EngineLoad(seconds=a), "b": EngineLoad(seconds=b)}
        for a, b in [
            ({"sampling": 1.0, "idle": 4.0}, {"sampling": 0.0, "idle": 0.0}),
            ({"sampling": 2.5, "idle": 4.5}, {"sampling": 0.5, "idle": 1.5}),
        ]
    )
    assert meter.measure(TrainedStep(0, 2.0, {}), before) == {}
    assert meter.measure(TrainedStep(1, 2.0, {}), after) == {"time/engine/sampling": 1.0, "time/engine/idle": 1.0}
