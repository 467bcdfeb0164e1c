"""SFT from a teacher that samples: cross entropy on the teacher's own tokens.

The teacher samples through the same env servers and harnesses as a policy would, so its rollouts have rewards and token
ids, and nothing is tokenized again.
"""

from collections.abc import Sequence

from ramify.orchestrate.algorithms.base import Algorithm, AlgorithmConfig, get_trainable_nodes
from ramify.run.store.group_state import DropReason
from ramify.trace import Annotation, Trace


class SftAlgorithmConfig(AlgorithmConfig):
    """Configuration of SFT."""

    min_reward: float | None = None
    """Rollouts with a smaller reward are not trained on. None: all are."""


class Sft(Algorithm):
    """Weight 1 for `ce` on every token that the teacher sampled."""

    config: SftAlgorithmConfig  # pyright: ignore[reportIncompatibleVariableOverride] - a plugin narrows it

    def annotate(self, group: Sequence[Trace]) -> list[Annotation]:
        """Return one annotation for each sampled node of the rollouts with enough reward."""
        return [
            Annotation(trace.id, node, rl=0.0, ce=1.0)
            for trace in group
            if self._has_min_reward(trace)
            for node in get_trainable_nodes(trace)
        ]

    def get_drop_reason(self, group: Sequence[Trace]) -> tuple[DropReason, str]:
        """Return why a group without annotations is dropped: all rewards are too small, or nothing was sampled."""
        if any(self._has_min_reward(trace) for trace in group):
            return super().get_drop_reason(group)
        return DropReason.BELOW_MIN_REWARD, f"no attempt reached min_reward = {self.config.min_reward:g}"

    def _has_min_reward(self, trace: Trace) -> bool:
        minimum = self.config.min_reward
        return minimum is None or (trace.reward is not None and trace.reward >= minimum)
