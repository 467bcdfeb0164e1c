"""Rollouts in which the policy fell apart: a rare token, chosen against all odds."""

import math

import numpy as np
from pydantic import Field

from ramify.orchestrate.algorithms.base import get_trainable_nodes
from ramify.orchestrate.filters.base import Filter, FilterConfig, FilterInput


class GibberishConfig(FilterConfig):
    """The gibberish filter."""

    token: int = Field(default=100_000, ge=0)
    """Ids above this are rare: tokenizers number tokens by how often they were merged."""
    margin: float = Field(default=2.0, ge=0)
    """How much less likely than an even guess the token has to be, in nats."""


class Gibberish(Filter):
    """Fires on a token above `token` whose logprob is below −ln V − `margin`, V being the vocabulary."""

    config: GibberishConfig

    def fires(self, rollout: FilterInput) -> bool:
        limit = -math.log(rollout.vocab_size) - self.config.margin
        nodes = rollout.trace.nodes
        for node in map(nodes.__getitem__, get_trainable_nodes(rollout.trace)):
            rare = node.token_ids[slice(*node.sampled_span)] > self.config.token
            if np.any(rare & (node.logprobs < limit)):
                return True
        return False
