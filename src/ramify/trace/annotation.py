"""What an algorithm says about a node: how much each of its tokens counts, and for what.

Annotations are kept beside the trace, never in it: the stored trace stays exactly what the environment returned.
"""

from __future__ import annotations

from dataclasses import dataclass

from ramify.trace.columns import Float32Array
from ramify.trace.trace import Trace

TokenWeight = float | Float32Array


@dataclass(slots=True, frozen=True, eq=False)
class Annotation:
    """Advantage, component weights and reference logprobs of tokens [span) of one node.

    Each value is one number for all of the span or one per token of it. A token is trained when at least one of its
    weights is not zero; `ce` alone may also reach tokens that the policy did not sample.
    """

    trace_id: str
    node: int
    span: tuple[int, int] | None = None  # tokens of the node; the sampled ones unless said
    advantage: TokenWeight = 0.0
    rl: TokenWeight = 1.0
    ce: TokenWeight = 0.0
    ref_kl: TokenWeight = 0.0
    ref_logprobs: Float32Array | None = None  # logprobs under the reference model


@dataclass(slots=True, frozen=True, eq=False)
class AnnotatedTrace:
    """A trace on its way into a batch, with all that is trained of it."""

    trace: Trace
    annotations: tuple[Annotation, ...]
    temperature: float = 1.0  # the trainer's logprobs are taken at it, as the sampler's were
    env: str = ""
