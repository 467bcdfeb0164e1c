"""MaxRL: maximize the log-likelihood of success instead of its expectation (Tajwar et al. 2026, 2602.02710).

The gradient of log p is that of p divided by p. Dividing by the group's mean reward estimates it, so a task that is
rarely solved counts more; with n attempts the first n terms of log p are maximized. Rewards should be from 0 to 1.
"""

from collections.abc import Sequence

import numpy as np

from ramify.orchestrate.algorithms.base import Algorithm, FloatArray, subtract_mean
from ramify.trace import Trace


class MaxRl(Algorithm):
    """A = (r − mean) / mean; 0 if no attempt earned a reward."""

    compares_attempts = True

    def advantages(self, rewards: FloatArray, traces: Sequence[Trace]) -> FloatArray:
        """Return the rewards minus their mean, divided by the mean."""
        mean = rewards.mean()
        return subtract_mean(rewards) / mean if mean > 0 else np.zeros_like(rewards)
