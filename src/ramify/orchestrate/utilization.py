"""How much of its time a run spends on work that the hardware cannot do faster.

Engines report the least time that their devices need for the steps they have run (`ramify.infer.step_work`), and the
trainer its share of peak operations. Both together, divided by the time from one step to the next, are the utilization.
It is left out if an engine or the trainer runs on a device whose peaks are unknown.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ramify.client.engine_load import EngineLoad
from ramify.evals.stats import safe_mean


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
        self._last_sampling: float | None = None

    def measure(self, trained: TrainedStep, loads: Sequence[EngineLoad]) -> float | None:
        """Return the utilization of a step; None if it is unknown, or an engine was restarted."""
        ideal = [load.ideal_seconds for load in loads if load.ideal_seconds is not None]
        sampling = safe_mean(ideal) if ideal and len(ideal) == len(loads) else None
        last, self._last_sampling = self._last_sampling, sampling
        training = trained.ideal_training_seconds
        if last is None or sampling is None or sampling < last or training is None:
            return None
        return (sampling - last + training) / trained.seconds
