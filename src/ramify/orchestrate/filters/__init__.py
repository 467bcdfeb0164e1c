"""Filters: rollouts that should not be trained on, found after the algorithm has spoken.

In `monitor` mode a filter only counts; in `enforce` mode what it fires on loses its annotations, and a group that has
none left is dropped. A plugin derives from `Filter` and is named in the configuration as every plugin is.
"""

from ramify.orchestrate.filters.base import Filter, FilterConfig, FilterInput, FilterResult, apply_filters

__all__ = ["Filter", "FilterConfig", "FilterInput", "FilterResult", "apply_filters"]
