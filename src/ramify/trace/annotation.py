"""Annotations of nodes: the advantage and the loss weights that an algorithm assigns to tokens.

Annotations are kept beside the trace, never in it: the stored trace stays exactly what the environment returned.
"""

from dataclasses import dataclass

import numpy as np

from ramify.trace.columns import Float32Array, StructuredArray
from ramify.trace.trace import Trace

TokenWeight = float | Float32Array

# One of the likeliest tokens at a position, and its logprob; the token -1 fills rows with fewer of them.
TOP_DTYPE = np.dtype([("token", "<i4"), ("logprob", "<f4")])


@dataclass(slots=True, frozen=True, eq=False)
class Annotation:
    """The advantage, the loss weights and the reference logprobs of tokens of one node.

    Each value is one number for the whole span or one per token. A token is trained if one of its weights is not zero;
    only `ce` applies to tokens that the policy did not sample.

    - `trace_id`, `node`: the trace, and the index of the node in it.
    - `span`: the range [start, stop) of the tokens, relative to the node. None: the sampled tokens.
    - `advantage`: how much better the tokens were than expected.
    - `rl`, `ce`: the weights of the policy gradient and of the cross entropy.
    - `ref_kl`, `kl`: the weights of the reverse KL to a reference model: as a policy gradient, which distils the
      reference, and as a penalty (the k3 estimator).
    - `ref_logprobs`: the logprobs of the tokens under the reference model. The orchestrator adds those that are missing
      where `ref_kl` or `kl` is not zero.
    - `top_k`: the number of likeliest tokens of the reference that `ref_kl` uses. 0: only the sampled token.
    - `ref_top`: these tokens with their logprobs [tokens, top_k], as `TOP_DTYPE`; the orchestrator adds them too.
    """

    trace_id: str
    node: int
    span: tuple[int, int] | None = None
    advantage: TokenWeight = 0.0
    rl: TokenWeight = 1.0
    ce: TokenWeight = 0.0
    ref_kl: TokenWeight = 0.0
    ref_logprobs: TokenWeight | None = None
    kl: TokenWeight = 0.0
    top_k: int = 0
    ref_top: StructuredArray | None = None

    @property
    def needs_reference(self) -> bool:
        """Whether a weight applies to the logprobs of a reference model."""
        return bool(np.any(self.ref_kl) or np.any(self.kl))


@dataclass(slots=True, frozen=True, eq=False)
class AnnotatedTrace:
    """A trace with the annotations of all its trained nodes.

    - `trace`, `annotations`: the trace, and an annotation for each trained node of it.
    - `temperature`: the sampler's temperature, at which the trainer computes logprobs too.
    - `env`: the name of the source, by which metrics are reported.
    """

    trace: Trace
    annotations: tuple[Annotation, ...]
    temperature: float = 1.0
    env: str = ""
