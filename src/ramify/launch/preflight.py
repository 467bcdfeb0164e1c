"""What `--dry-run` checks beyond the plan: all that a process of the run would refuse when it starts.

Only what depends on the machine is left out, so that a run for another one can be planned here: GPUs, and a model that
is not here. What only shows when a model is loaded is left to the run.
"""

import difflib

from ramify.config import refuse
from ramify.errors import ConfigInvalid, ModelNotFound, RamifyError
from ramify.launch.carrying import claim
from ramify.launch.tables import check_tables
from ramify.model.resolve import PACKAGED, resolve
from ramify.orchestrate.config import RunConfig
from ramify.render import load_renderer
from ramify.store import RunStore
from ramify.store.directory import check_identity
from ramify.store.environments import Observed, find_changes, refuse_changes
from ramify.store.store import DATABASE
from ramify.wire.address import check_bind


def check_start(config: RunConfig, *, fresh: bool = False, accept_changes: bool = False) -> None:
    """Refuse what the run would refuse at its start. `fresh` and `accept_changes` are as the run would get them."""
    problems = [*_problems_of_address(config), *_problems_of_model(config)]
    if problems:
        refuse(problems)
    environments = check_tables(config, start=True)
    with claim(config.path):
        if not fresh and (config.path / DATABASE).is_file():
            with RunStore.open(config.path, write=False) as store:
                check_identity(store, config.identity, accept_changes)
                if not accept_changes:
                    observed = {name: Observed(identity) for name, identity in environments.items()}
                    refuse_changes(store, find_changes(store, observed))


def _problems_of_address(config: RunConfig) -> list[tuple[str, str]]:
    try:
        check_bind(config.orchestrator.address, config.secret)
    except ConfigInvalid as error:
        return [("orchestrator.address", error.message.removeprefix("address: "))]
    return []


def _problems_of_model(config: RunConfig) -> list[tuple[str, str]]:
    """A model with a name like that of a packaged one is misspelt; any other that is not here may be elsewhere."""
    try:
        directory = resolve(config.model.name)
    except ModelNotFound as error:
        misspelt = difflib.get_close_matches(config.model.name, PACKAGED, n=1)
        return [("model.name", error.message)] if misspelt else []
    try:
        load_renderer(directory, config.renderer)
    except RamifyError as error:
        return [("renderer", error.message)]
    return []
