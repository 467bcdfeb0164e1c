"""Detects gibberish: a rare token that was sampled although it was very unlikely."""

import math

import numpy as np
from pydantic import Field

from ramify.orchestrate.algorithms.base import get_trainable_nodes
from ramify.orchestrate.filters.base import Filter, FilterConfig, FilterInput


class GibberishConfig(FilterConfig):
    """Configuration of the gibberish filter."""

    token_id_threshold: int = Field(default=100_000, ge=0)
    """Token ids above this count as rare: tokenizers number tokens in the order of their merges."""
    logprob_offset: float = Field(default=2.0, ge=0)
    """How far the logprob must be below that of a uniform guess, in nats."""


class Gibberish(Filter):
    """Fires on a token id above `token_id_threshold` whose logprob is below −ln V − `logprob_offset`.

    V is the size of the vocabulary.
    """

    config: GibberishConfig  # pyright: ignore[reportIncompatibleVariableOverride] - a plugin narrows it

    def fires(self, rollout: FilterInput) -> bool:
        """Return whether the policy sampled a rare token whose logprob is below the limit."""
        limit = -math.log(rollout.vocab_size) - self.config.logprob_offset
        logprobs = rollout.trace.graph.logprobs.view
        if not np.any(logprobs < limit):
            return False  # most rollouts end here: what follows is slow
        nodes = rollout.trace.nodes
        for node in map(nodes.__getitem__, get_trainable_nodes(rollout.trace)):
            rare = node.token_ids[slice(*node.sampled_span)] > self.config.token_id_threshold
            if np.any(rare & (node.logprobs < limit)):
                return True
        return False
