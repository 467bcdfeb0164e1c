"""Algorithms: how the rewards of a group become advantages and weights of its tokens.

Each is one short file. An algorithm writes annotations, and nothing behind it knows its name. A plugin derives from
`Algorithm` and is named in the configuration as every plugin is.
"""

from ramify.orchestrate.algorithms.base import Algorithm, AlgorithmConfig, count_sampled_tokens, get_trainable_nodes

__all__ = ["Algorithm", "AlgorithmConfig", "count_sampled_tokens", "get_trainable_nodes"]
