"""OPD, on-policy distillation: the policy samples, and a teacher scores every token (Agarwal et al. 2024, 2306.13649).

The loss is the reverse KL to the teacher, estimated on the sampled tokens. It needs no reward: a token is pushed up
where the teacher gives it more probability than the policy does. With `top_k`, it is a lower bound of the KL instead,
computed from the k likeliest tokens of the teacher at each position: less noise, but more to transfer and store.
"""

from collections.abc import Sequence

from pydantic import Field

from ramify.orchestrate.algorithms.base import Algorithm, AlgorithmConfig, get_trainable_nodes
from ramify.trace import Annotation, Trace


class OpdConfig(AlgorithmConfig):
    """Configuration of OPD."""

    top_k: int = Field(default=0, ge=0)
    """The number of likeliest tokens of the teacher that the loss uses. 0: only the sampled token."""


class Opd(Algorithm):
    """Weight 1 for `ref_kl` on every sampled token; the teacher's logprobs are added afterwards."""

    config: OpdConfig  # pyright: ignore[reportIncompatibleVariableOverride] - a plugin narrows it

    def annotate(self, group: Sequence[Trace]) -> list[Annotation]:
        """Return one annotation for each sampled node."""
        return [
            Annotation(trace.id, node, rl=0.0, ref_kl=1.0, top_k=self.config.top_k)
            for trace in group
            for node in get_trainable_nodes(trace)
        ]
