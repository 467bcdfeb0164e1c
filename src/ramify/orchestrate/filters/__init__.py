"""Filters detect rollouts that should not be trained on, after the algorithm has annotated them.

In `monitor` mode a filter only counts. In `enforce` mode a rollout that it fires on loses its annotations, and a group
without annotations is dropped. A plugin subclasses `Filter` and is named in the configuration like any plugin.
"""

from ramify.orchestrate.filters.base import Filter, FilterConfig, FilterInput, FilterResult, apply_filters

__all__ = ["Filter", "FilterConfig", "FilterInput", "FilterResult", "apply_filters"]
