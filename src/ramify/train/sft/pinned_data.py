"""The datasets of the Hugging Face hub that an SFT run reads: downloaded before it starts, at a commit that stays."""

import contextlib
import itertools
from pathlib import Path
from typing import TypeVar

from ramify.core.config import CONFIG_FILE, read_stored_config
from ramify.core.errors import ConfigInvalid
from ramify.core.hub import Log
from ramify.env.data_config import DataFilesConfig
from ramify.env.data_selection import pin_dataset, pin_taskset
from ramify.rollout.evals.config import EvalSourceConfig
from ramify.run.lookup import default_run_name
from ramify.train.sft.config import SftConfig

D = TypeVar("D", bound=DataFilesConfig)


def get_sft_path(config: SftConfig) -> Path:
    """Return the directory of the run."""
    names = "+".join(Path(dataset.path).name for dataset in config.datasets)
    return config.output / (config.name or default_run_name(names, config.model.name, config.identity))


def pin_sft_datasets(config: SftConfig, *, fresh: bool, log: Log | None) -> SftConfig:
    """Return the configuration with the commit of each dataset of the hub, see `pin_dataset`."""
    path = get_sft_path(config)
    previous = None if fresh else _read_previous(path)
    previous_data = previous.datasets if previous else []
    previous_evals = {source.source_name: source.taskset for source in previous.eval} if previous else {}

    def pin(dataset: D, before: DataFilesConfig | None, key: str) -> D:
        commit = pin_dataset(dataset, before, key=key, log=log)
        return dataset if commit is None else dataset.model_copy(update={"revision": commit})

    def pin_eval(number: int, source: EvalSourceConfig) -> EvalSourceConfig:
        before = previous_evals.get(source.source_name)
        table = pin_taskset(source.taskset, before, key=f"eval.{number}.taskset", log=log)
        return source.model_copy(update={"taskset": table})

    pairs = itertools.zip_longest(config.datasets, previous_data[: len(config.datasets)])
    datasets = [pin(dataset, before, "data") for dataset, before in pairs]
    validation = config.validation
    if config.validation_data is not None:
        pinned = pin(config.validation_data, previous.validation_data if previous else None, "validation")
        validation = validation.model_copy(update={"revision": pinned.revision})
    return config.model_copy(
        update={
            "name": str(path.relative_to(config.output)),  # the default name does not depend on the commits
            "data": datasets if isinstance(config.data, list) else datasets[0],
            "validation": validation,
            "eval": [pin_eval(number, source) for number, source in enumerate(config.eval)],
        }
    )


def _read_previous(path: Path) -> SftConfig | None:
    """Return the configuration with which the run was started before; None if this is its first start."""
    with contextlib.suppress(ConfigInvalid):
        return read_stored_config(SftConfig, path / CONFIG_FILE)
    return None
