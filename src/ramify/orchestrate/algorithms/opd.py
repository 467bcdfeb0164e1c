"""OPD, on-policy distillation: the policy samples, and a teacher scores every token (Agarwal et al. 2024, 2306.13649).

The loss is the reverse KL to the teacher, estimated on the sampled tokens. It needs no reward: a token is pushed up
where the teacher gives it more probability than the policy does. With `top_k`, it is a lower bound of the KL instead,
computed from the k likeliest tokens of the teacher at each position: less noise, but more to transfer and store.
"""

from collections.abc import Sequence

from pydantic import Field

from ramify.orchestrate.algorithms import Algorithm, AlgorithmConfig, get_trainable_nodes
from ramify.run.store.group_state import DropReason
from ramify.trace import Annotation, Trace


class SftAlgorithmConfig(AlgorithmConfig):
    """Configuration of SFT."""

    min_reward: float | None = None
    """Rollouts with a smaller reward are not trained on. None: all are."""


class Sft(Algorithm):
    """SFT from a teacher that samples: weight 1 for `ce` on every token that the teacher sampled.

    The teacher samples through the same env servers and harnesses as a policy would, so its rollouts have rewards and
    token ids, and nothing is tokenized again.
    """

    config: SftAlgorithmConfig

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


class OpdConfig(AlgorithmConfig):
    """Configuration of OPD."""

    top_k: int = Field(default=0, ge=0)
    """The number of likeliest tokens of the teacher that the loss uses. 0: only the sampled token."""


class Opd(Algorithm):
    """Weight 1 for `ref_kl` on every sampled token; the teacher's logprobs are added afterwards."""

    config: OpdConfig

    def annotate(self, group: Sequence[Trace]) -> list[Annotation]:
        """Return one annotation for each sampled node."""
        return [
            Annotation(trace.id, node, rl=0.0, ref_kl=1.0, top_k=self.config.top_k)
            for trace in group
            for node in get_trainable_nodes(trace)
        ]
