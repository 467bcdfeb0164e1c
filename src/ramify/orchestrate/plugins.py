"""The plugins of a run's own process: an algorithm for each train source, and the filters."""

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
    """What turns groups into annotations."""

    algorithms: dict[str, Algorithm]  # by the name of the source
    filters: tuple[Filter, ...]


def load_plugins(config: RunConfig) -> RunPlugins:
    """Find and check every algorithm and filter; raises ConfigInvalid naming the key that is wrong."""
    tables: list[tuple[str, str, dict[str, Any]]] = [
        ("algorithm", f"train.{number}.algorithm", source.algorithm) for number, source in enumerate(config.train)
    ]
    filters = config.orchestrator.filters
    tables += [("filter", f"orchestrator.filters.{number}", table) for number, table in enumerate(filters)]
    found: list[Any] = []
    problems: list[str] = []
    for kind, at, table in tables:
        try:
            found.append(plugin.build_plugin(kind, table, table_key=at))
        except ConfigInvalid as error:
            problems += error.message.splitlines()[1:]
    if problems:
        raise_config_invalid([("", problem.strip()) for problem in problems])
    algorithms = dict(zip([source.source_name for source in config.train], found))
    return RunPlugins(algorithms, tuple(found[len(config.train) :]))


def build_source_mix(config: RunConfig, task_counts: dict[str, int | None]) -> SourceMix:
    """The sources of a run, given how many tasks each has (None: no end)."""
    curricula = {
        source.source_name: build_curriculum(
            source.curriculum, task_counts[source.source_name], f"{config.seed}:{source.source_name}"
        )
        for source in config.train
    }
    return SourceMix({source.source_name: source.ratio for source in config.train}, curricula)
