"""RLOO: a rollout against the mean of the others (Ahmadian et al. 2024, 2402.14740).

The baseline does not hold the rollout's own reward, so it leaves the gradient's expectation as it is.
"""

from collections.abc import Sequence

from ramify.orchestrate.algorithms.base import Algorithm, AlgorithmConfig, FloatArray, subtract_mean
from ramify.trace import Trace


class Rloo(Algorithm):
    """A = r − mean of the others, which is n / (n − 1) · (r − mean). Alone, a rollout has none."""

    config: AlgorithmConfig

    def advantages(self, rewards: FloatArray, traces: Sequence[Trace]) -> FloatArray:
        count = len(rewards)
        return subtract_mean(rewards) * (count / (count - 1) if count > 1 else 0.0)
