"""RLOO: reward minus the mean of the other rollouts (Ahmadian et al. 2024, 2402.14740).

The baseline does not include the rollout's own reward, so the gradient estimate stays unbiased.
"""

from collections.abc import Sequence

from ramify.orchestrate.algorithms.base import Algorithm, FloatArray, subtract_mean
from ramify.trace import Trace


class Rloo(Algorithm):
    """A = r − mean of the others, which is n / (n − 1) · (r − mean); 0 for a group of one."""

    compares_attempts = True

    def advantages(self, rewards: FloatArray, traces: Sequence[Trace]) -> FloatArray:
        """Return each reward minus the mean of the others."""
        count = len(rewards)
        return subtract_mean(rewards) * (count / (count - 1) if count > 1 else 0.0)
