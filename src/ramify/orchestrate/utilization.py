"""How much of its time a run spends on work that the hardware cannot do faster.

Engines report the least time that their devices need for the steps they have run (`ramify.infer.step_work`), and the
trainer its share of peak operations. Both together, divided by the time from one step to the next, are the utilization.
It is left out if an engine or the trainer runs on a device whose peaks are unknown.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ramify.infer.client.engine_load import EngineLoad
from ramify.rollout.evals.stats import safe_mean


class TrainedStep(NamedTuple):
    """A step that the trainer has reported."""

    step: int
    seconds: float
    """Since the step before."""
    metrics: Mapping[str, float]

    @property
    def ideal_training_seconds(self) -> float | None:
        """The least time for the training; None if it is unknown."""
        mfu = self.metrics.get("train/mfu")
        return None if mfu is None else mfu * self.metrics["train/seconds"]


class UtilizationMeter:
    """Measures the utilization of each step; the engines' reports are totals, so it keeps the last ones."""

    def __init__(self) -> None:
        self._last_totals: dict[str, float] = {}  # ideal seconds of each engine, by URL

    def measure(self, trained: TrainedStep, loads: Mapping[str, EngineLoad]) -> float | None:
        """Return the utilization of a step, given the loads of the engines by URL.

        It is None if it is unknown, if an engine was restarted, or if other engines than for the last step reported.
        """
        totals = {url: load.ideal_seconds for url, load in loads.items() if load.ideal_seconds is not None}
        last_totals, self._last_totals = self._last_totals, totals
        training = trained.ideal_training_seconds
        if training is None or not totals or not totals.keys() == loads.keys() == last_totals.keys():
            return None
        sampling = [totals[url] - last_totals[url] for url in totals]  # of each engine
        return None if min(sampling) < 0 else (safe_mean(sampling) + training) / trained.seconds
