"""Algorithms turn the rewards of a group into advantages and weights of its tokens.

Each algorithm is one short file. It returns annotations; nothing after it depends on which algorithm made them. A
plugin subclasses `Algorithm` and is named in the configuration like any plugin.
"""

from ramify.orchestrate.algorithms.base import Algorithm, AlgorithmConfig, count_sampled_tokens, get_trainable_nodes

__all__ = ["Algorithm", "AlgorithmConfig", "count_sampled_tokens", "get_trainable_nodes"]
