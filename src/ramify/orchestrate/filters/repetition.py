"""Detects repetition: a model that repeats itself is almost certain of every token."""

import math

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ramify.orchestrate.algorithms.base import get_trainable_nodes
from ramify.orchestrate.filters.base import Filter, FilterConfig, FilterInput


class RepetitionConfig(FilterConfig):
    """Configuration of the repetition filter."""

    window: int = Field(default=3000, ge=1)
    """Number of consecutive tokens."""
    prob_threshold: float = Field(default=0.99, gt=0, lt=1)
    """Probability that each of them must exceed."""


class Repetition(Filter):
    """Fires on `window` consecutive tokens of one reply, each with a probability above `prob_threshold`."""

    config: RepetitionConfig  # pyright: ignore[reportIncompatibleVariableOverride] - a plugin narrows it

    def fires(self, rollout: FilterInput) -> bool:
        """Return whether a long run of tokens was sampled almost with certainty."""
        if rollout.trace.completion_len < self.config.window:
            return False  # most rollouts end here: what follows is slow
        limit = math.log(self.config.prob_threshold)
        nodes = rollout.trace.nodes
        runs = (_longest_run(nodes[node].logprobs > limit) for node in get_trainable_nodes(rollout.trace))
        return max(runs, default=0) >= self.config.window


def _longest_run(is_confident: npt.NDArray[np.bool_]) -> int:
    """Return the length of the longest run of True."""
    edges = np.flatnonzero(np.diff(is_confident, prepend=False, append=False))
    return int((edges[1::2] - edges[::2]).max(initial=0))
