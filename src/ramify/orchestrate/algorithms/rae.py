"""RAE, role-conditioned advantage estimation: a baseline for each agent of a game (Liu et al. 2025, 2506.24119).

The policy plays all agents, but an agent that moves first, or has the better cards, earns more whatever it does. The
baseline of an agent is the mean reward of the agent in earlier groups. It does not contain the rewards that are
compared with it, so the gradient estimate stays unbiased, also for a group of one attempt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from ramify.orchestrate.algorithms.base import Algorithm, AlgorithmConfig, annotate_advantage, group_by_agent
from ramify.trace import Annotation, Trace


class RaeConfig(AlgorithmConfig):
    """Configuration of RAE."""

    decay: float = Field(default=0.95, ge=0, lt=1)
    """Weight of the earlier groups when a group updates a baseline; the last 1 / (1 − decay) groups count most."""


class Rae(Algorithm):
    """A = r − b; then b ← b + max(1 − decay, 1 / n) · (mean − b), where this is the n-th group of the agent."""

    config: RaeConfig  # pyright: ignore[reportIncompatibleVariableOverride] - a plugin narrows it

    def annotate_with_state(
        self, group: Sequence[Trace], state: Mapping[str, Any]
    ) -> tuple[list[Annotation], dict[str, Any]]:
        """Return the annotations, and the baseline and the number of groups of each agent."""
        annotations, new_state = list[Annotation](), dict(state)
        for agent, (traces, rewards) in group_by_agent(group).items():
            baseline, num_groups = state.get(agent, (0.0, 0))
            for trace, reward in zip(traces, rewards.tolist(), strict=True):
                annotations += annotate_advantage(trace, reward - baseline)
            step = max(1 - self.config.decay, 1 / (num_groups + 1))
            new_state[agent] = [baseline + step * (float(np.mean(rewards)) - baseline), num_groups + 1]
        return annotations, new_state
