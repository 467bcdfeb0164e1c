"""GRPO: reward minus the mean of the group, in standard deviations of the group (Shao et al. 2024, 2402.03300)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field

from ramify.orchestrate.algorithms.base import (
    Algorithm,
    AlgorithmConfig,
    FloatArray,
    count_sampled_tokens,
    subtract_mean,
)
from ramify.trace import Annotation, Trace

EPSILON = 1e-6


class GrpoConfig(AlgorithmConfig):
    """Configuration of GRPO."""

    normalize: bool = True
    """Divide by the standard deviation of the group, so that groups with similar rewards count as much as others."""
    length_penalty: float = Field(default=0.0, ge=0)
    """Reward penalty for length: full for the longest rollout of the group, 0 for the shortest, linear between."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty to the source's `reference`."""


class Grpo(Algorithm):
    """A = (r − mean) / std, where r is the reward minus the length penalty."""

    config: GrpoConfig  # pyright: ignore[reportIncompatibleVariableOverride] - a plugin narrows it
    compares_attempts = True

    def advantages(self, rewards: FloatArray, traces: Sequence[Trace]) -> FloatArray:
        """Return the centered rewards, less the length penalty, divided by their deviation if `normalize` is set."""
        if self.config.length_penalty:
            rewards = rewards - self.config.length_penalty * _compute_relative_lengths(traces)
        centered_rewards = subtract_mean(rewards)
        if not self.config.normalize or len(centered_rewards) < 2:
            return centered_rewards
        return centered_rewards / (centered_rewards.std(ddof=1) + EPSILON)

    def annotate(self, group: Sequence[Trace]) -> list[Annotation]:
        """Return the annotations of the group, with the weight of the KL penalty."""
        annotations = super().annotate(group)
        if not self.config.beta:
            return annotations
        return [replace(annotation, kl=self.config.beta) for annotation in annotations]


def _compute_relative_lengths(traces: Sequence[Trace]) -> FloatArray:
    """Return the relative length of each rollout, from 0 (shortest of the group) to 1 (longest)."""
    lengths = np.array([count_sampled_tokens(trace) for trace in traces], np.float64)
    return (lengths - lengths.min()) / max(1.0, np.ptp(lengths))
