"""Dr. GRPO: GRPO without its biases (Liu et al. 2025, 2503.20783).

It does not divide by the standard deviation of the group, which favours tasks that are too easy or too hard. Nor does
it divide by the length of a rollout, which makes long wrong answers cheap: the trainer's mean over the entries of the
batch already gives every token the same weight.
"""

from collections.abc import Sequence

from ramify.orchestrate.algorithms.base import Algorithm, FloatArray, subtract_mean
from ramify.trace import Trace


class DrGrpo(Algorithm):
    """A = r − mean."""

    compares_attempts = True

    def advantages(self, rewards: FloatArray, traces: Sequence[Trace]) -> FloatArray:
        """Return the rewards minus their mean."""
        return subtract_mean(rewards)
