"""GRPO: reward minus the mean of the group, in standard deviations of the group (Shao et al. 2024, 2402.03300)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from ramify.orchestrate.algorithms import (
    Algorithm,
    AlgorithmConfig,
    FloatArray,
    annotate_advantage,
    count_sampled_tokens,
    group_by_agent,
    subtract_mean,
)
from ramify.trace import Annotation, Trace


class RaeConfig(AlgorithmConfig):
    """Configuration of RAE."""

    decay: float = Field(default=0.95, ge=0, lt=1)
    """Weight of the earlier groups when a group updates a baseline; the last 1 / (1 − decay) groups count most."""


class Rae(Algorithm):
    """Role-conditioned advantage estimation: a baseline for each agent of a game (Liu et al. 2025, 2506.24119).

    A = r − b; then b ← b + max(1 − decay, 1 / n) · (mean − b), where this is the n-th group of the agent. An agent that
    moves first, or has the better cards, earns more whatever it does. The baseline does not contain the rewards that
    are compared with it, so the gradient estimate stays unbiased, also for a group of one attempt.
    """

    config: RaeConfig

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


class MaxRl(Algorithm):
    """A = (r − mean) / mean; 0 if no attempt earned a reward (Tajwar et al. 2026, 2602.02710).

    It maximizes the log-likelihood of success instead of its expectation, so a task that is rarely solved counts more;
    with n attempts the first n terms of log p are maximized. Rewards should be from 0 to 1.
    """

    compares_attempts = True

    def advantages(self, rewards: FloatArray, traces: Sequence[Trace]) -> FloatArray:
        """Return the rewards minus their mean, divided by the mean."""
        mean = rewards.mean()
        return subtract_mean(rewards) / mean if mean > 0 else np.zeros_like(rewards)


class Rloo(Algorithm):
    """A = r − mean of the others, which is n / (n − 1) · (r − mean); 0 for a group of one (Ahmadian et al. 2024,
    2402.14740).

    The baseline does not include the rollout's own reward, so the gradient estimate stays unbiased.
    """

    compares_attempts = True

    def advantages(self, rewards: FloatArray, traces: Sequence[Trace]) -> FloatArray:
        """Return each reward minus the mean of the others."""
        count = len(rewards)
        return subtract_mean(rewards) * (count / (count - 1) if count > 1 else 0.0)


class DrGrpo(Algorithm):
    """A = r − mean: GRPO without its biases (Liu et al. 2025, 2503.20783).

    Dividing by the standard deviation of the group would favour tasks that are too easy or too hard, and dividing by
    the length of a rollout would make long wrong answers cheap: the trainer's mean gives every token the same weight.
    """

    compares_attempts = True

    def advantages(self, rewards: FloatArray, traces: Sequence[Trace]) -> FloatArray:
        """Return the rewards minus their mean."""
        return subtract_mean(rewards)


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

    config: GrpoConfig
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


class EchoConfig(GrpoConfig):
    """Configuration of Echo."""

    role_weights: dict[str, float] = {"tool": 0.1}
    """Weight of the cross entropy on the content of messages, by their role."""


class Echo(Grpo):
    """GRPO on what the policy sampled, and cross entropy on the content of each message with a weighted role.

    Predicting tool output teaches how the environment behaves, also in groups whose rewards are all equal.
    """

    compares_attempts = False  # a single attempt has tool output to learn from
    config: EchoConfig

    def annotate(self, group: Sequence[Trace]) -> list[Annotation]:
        """Return the annotations of sampled and of weighted messages."""
        weights = self.config.role_weights
        return super().annotate(group) + [
            Annotation(trace.id, node.index, node.content_span, rl=0.0, ce=weights[node.message.role])
            for trace in group
            for node in trace.nodes
            if node.sampled_span == (0, 0) and node.message.role in weights and node.content_span != (0, 0)
        ]
