"""Loads the plugins of the orchestrator: the algorithm of each train source, and the filters."""

from dataclasses import dataclass
from typing import Any

from ramify.config import raise_config_invalid
from ramify.env import plugin
from ramify.errors import ConfigInvalid
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
    plugins: list[Any] = []
    problems: list[str] = []
    for kind, key, table in config.plugin_tables:
        try:
            plugins.append(plugin.build_plugin(kind, table, table_key=key))
        except ConfigInvalid as error:
            problems += error.message.splitlines()[1:]
    if problems:
        raise_config_invalid([("", problem.strip()) for problem in problems])
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
