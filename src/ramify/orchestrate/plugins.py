"""Loads the plugins of the orchestrator: the algorithm of each train source, and the filters."""

from dataclasses import dataclass
from typing import Any

from ramify.env import plugin
from ramify.orchestrate.algorithms import Algorithm
from ramify.orchestrate.config import RunConfig
from ramify.orchestrate.curriculum import build_curriculum
from ramify.orchestrate.filters import Filter
from ramify.orchestrate.source_mix import SourceMix


@dataclass(frozen=True, slots=True)
class RunPlugins:
    """The plugins that turn the traces of a group into annotations."""

    algorithms: dict[str, Algorithm]  # by source name
    filters: tuple[Filter, ...]


def load_plugins(config: RunConfig) -> RunPlugins:
    """Load every algorithm and filter. Raises ConfigInvalid with all wrong keys."""
    plugins: list[Any] = [plugin_class(table) for plugin_class, table in plugin.resolve_plugins(config.plugin_tables)]
    algorithms = dict(zip([source.source_name for source in config.train], plugins))
    return RunPlugins(algorithms, tuple(plugins[len(config.train) :]))


def build_source_mix(config: RunConfig, task_counts: dict[str, int | None]) -> SourceMix:
    """Build the mix of the train sources, given the number of tasks of each (None: unbounded)."""
    sources = {source.source_name: source for source in config.train}
    curricula = {
        name: build_curriculum(source.curriculum, task_counts[name], f"{config.seed}:{name}")
        for name, source in sources.items()
    }
    return SourceMix({name: source.ratio for name, source in sources.items()}, curricula)
