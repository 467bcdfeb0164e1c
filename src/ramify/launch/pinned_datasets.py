"""The datasets of the Hugging Face hub that a run reads: downloaded before anything starts, at a commit that stays.

The commit replaces the `revision` in the configuration of the run, so every process reads the same files, and it is
part of the run's identity. A resumed run keeps it, see `pin_dataset`.
"""

import contextlib
from typing import Any

from ramify.core.config import CONFIG_FILE, read_stored_config
from ramify.core.errors import ConfigInvalid
from ramify.core.hub import MAIN_REVISION, Log
from ramify.env.data_selection import find_dataset, find_kept_commit, find_missing_dataset, pin_taskset
from ramify.orchestrate.run_config import RunConfig, TrainSourceConfig
from ramify.rollout.evals.config import EvalSourceConfig

MAIN_REVISIONS = (None, MAIN_REVISION)  # no revision is the main branch
SourceKey = tuple[str, str]  # train or eval, and the name of the source


def pin_datasets(config: RunConfig, *, fresh: bool, accept_changes: bool, log: Log | None) -> RunConfig:
    """Return the configuration with the commit of each dataset. Raises ConfigInvalid.

    Without `log` nothing is downloaded, and datasets that would have to be downloaded are left as they are.
    """
    if not any(find_dataset(source.taskset) for source in (*config.train, *config.eval)):
        return config
    previous = {} if fresh else _read_previous_tasksets(config)
    pinned: dict[str, Any] = {}
    commits: dict[tuple[str, str | None], str] = {}  # of each dataset and revision: their sources read the same one
    for kind, source in _list_sources(config):
        if (kept := find_kept_commit(source.taskset, previous.get((kind, source.source_name)))) is not None:
            commits.setdefault((source.taskset["path"], None), kept)  # also for sources before it in the list
    for kind in ("train", "eval"):
        sources: list[Any] = list(getattr(config, kind))
        for number, source in enumerate(sources):
            if source.address is not None or (dataset := find_dataset(source.taskset)) is None:
                continue
            before, table = previous.get((kind, source.source_name)), source.taskset
            commit = commits.get((dataset.path, dataset.revision))
            if commit is not None and find_kept_commit(table, before) is None:
                table = {**table, "revision": commit}
            key = f"{kind}.{number}.taskset"
            table = pin_taskset(table, before, key=key, log=log, accept_changes=accept_changes)
            if "revision" in table:
                for revision in MAIN_REVISIONS if dataset.revision in MAIN_REVISIONS else (dataset.revision,):
                    commits.setdefault((dataset.path, revision), table["revision"])
            sources[number] = source.model_copy(update={"taskset": table})
        pinned[kind] = sources
    name = str(config.path.relative_to(config.output))  # the default name does not depend on the commit
    return config.model_copy(update={**pinned, "name": name})


def list_missing_datasets(config: RunConfig) -> dict[str, str]:
    """Return the datasets that the run would download, by the key of the source."""
    return {
        f"{kind}.{number}": path
        for kind, sources in (("train", config.train), ("eval", config.eval))
        for number, source in enumerate(sources)
        if source.address is None and (path := find_missing_dataset(source.taskset)) is not None
    }


def list_dataset_notes(config: RunConfig) -> list[str]:
    """Return a note for each dataset that the run would download."""
    return [
        f"note: {key}.taskset.path: the run downloads {path} when it starts; to do it now: 'ramify data {path}'"
        for key, path in list_missing_datasets(config).items()
    ]


def _read_previous_tasksets(config: RunConfig) -> dict[SourceKey, dict[str, Any]]:
    """Return the tables of the tasksets with which the run was started before; none if this is its first start."""
    with contextlib.suppress(ConfigInvalid):
        stored = read_stored_config(RunConfig, config.path / CONFIG_FILE)
        return {(kind, source.source_name): source.taskset for kind, source in _list_sources(stored)}
    return {}


def _list_sources(config: RunConfig) -> list[tuple[str, TrainSourceConfig | EvalSourceConfig]]:
    return [*(("train", source) for source in config.train), *(("eval", source) for source in config.eval)]
