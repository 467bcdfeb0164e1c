"""Checks of `--dry-run` beyond the plan: everything that a process of the run would refuse at its start.

GPUs that are not on this machine are assumed, and models that the run would download or export are not checked. Nor are
the published weights of another run, which may still have to train them. So a run for another machine can be planned
here. Problems that appear only when the model is loaded are left to the run.
"""

from pathlib import Path

from ramify.core.errors import ConfigInvalid, ConfigProblem, ModelNotFound, RamifyError
from ramify.launch.plugin_check import check_plugin_tables, raise_with_plugin_problems
from ramify.launch.run_checks import find_run_problems, list_missing_models
from ramify.launch.run_directory import check_environments
from ramify.model.render import load_renderer
from ramify.model.resolve import is_fetchable, resolve_model_path
from ramify.orchestrate.run_config import RunConfig
from ramify.processes.wire.address import check_bind_address
from ramify.run.store import RunStore
from ramify.run.store.run_directory import check_identity
from ramify.run.store.run_store import DATABASE_NAME
from ramify.run.supervisor_lock import lock_run
from ramify.train.weights_directory import WEIGHTS_DIR


def check_start(config: RunConfig, *, fresh: bool = False, accept_changes: bool = False) -> None:
    """Raise what the run would raise at its start. `fresh` and `accept_changes` have the meaning that `rl` gives them.

    Raises ConfigInvalid, EnvironmentChanged, EnvironmentFault or RunBusy.
    """
    run_problems = find_run_problems(config, dry_run=True)
    if problems := [*run_problems, *_find_address_problems(config), *_find_model_problems(config)]:
        raise_with_plugin_problems(config, problems, include_start_checks=True)
    environments = check_plugin_tables(config, include_start_checks=True)
    with lock_run(config.path):
        if not fresh and (config.path / DATABASE_NAME).is_file():
            with RunStore.open(config.path, write=False) as store:
                check_identity(store, config.identity, accept_changes)
                if not accept_changes:
                    check_environments(store, environments)


def _find_address_problems(config: RunConfig) -> list[ConfigProblem]:
    try:
        check_bind_address(config.orchestrator.address, config.secret)
    except ConfigInvalid as error:
        return [ConfigProblem("orchestrator.address", problem.text) for problem in error.problems]
    return []


def _find_model_problems(config: RunConfig) -> list[ConfigProblem]:
    """Return problems of the models and the renderer. A missing model is one unless the run fetches it."""
    problems = [
        ConfigProblem(key, text)
        for key, name, text in list_missing_models(config)
        if not is_fetchable(name) and (key == "model.name" or Path(name).parent.name != WEIGHTS_DIR)
    ]
    try:
        load_renderer(resolve_model_path(config.model.name), config.renderer)
    except ModelNotFound:
        pass  # it is one of the missing models
    except RamifyError as error:
        problems.append(ConfigProblem("renderer", error.message))
    return problems
