"""OPD, on-policy distillation: the policy samples, and a teacher scores every token (Agarwal et al. 2024, 2306.13649).

The loss is the reverse KL to the teacher, estimated on the sampled tokens. It needs no reward: a token is pushed up
where the teacher gives it more probability than the policy does.
"""

from collections.abc import Sequence

from ramify.orchestrate.algorithms.base import Algorithm, get_trainable_nodes
from ramify.trace import Annotation, Trace


class Opd(Algorithm):
    """Weight 1 for `ref_kl` on every sampled token; the teacher's logprobs are added afterwards."""

    def annotate(self, group: Sequence[Trace]) -> list[Annotation]:
        """Return one annotation for each sampled node."""
        return [
            Annotation(trace.id, node, rl=0.0, ref_kl=1.0) for trace in group for node in get_trainable_nodes(trace)
        ]
