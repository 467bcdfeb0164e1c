"""The start and the end of a run in its directory, which records that all steps are done or that the tasks ran out."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ramify.core.errors import ConfigInvalid
from ramify.core.interactive import run_coroutine
from ramify.orchestrate.batches import get_top_logprobs_path
from ramify.orchestrate.run_config import RunConfig
from ramify.processes.child import KILL_TIMEOUT, STOP_TIMEOUT
from ramify.run.fencing.head_log import DirectoryStore
from ramify.run.store import RunStore, open_run
from ramify.run.store.environments import ACCEPT_CHANGES_KEY, ObservedEnvironment, check_no_changes, find_changes
from ramify.run.store.head_replication import HeadReplicator, read_state
from ramify.run.store.ledger import Ledger

FINISHED_KEY = "finished"  # fact: the number of steps of a finished run
EXHAUSTED_KEY = "exhausted"  # fact: the curricula of a run that finished because its tasks ran out
READER_TIMEOUT = 60.0  # seconds to wait for commands that read the run


def prepare_run_directory(
    config: RunConfig,
    *,
    fresh: bool = False,
    accept_changes: bool | None = None,
    environments: Mapping[str, dict[str, Any]] | None = None,
) -> int | None:
    """Create or check the run directory; return the number of steps if the run is finished, else None.

    `fresh` renames an old directory. `environments` holds the identities of the sources whose code is on this machine:
    a change raises EnvironmentChanged before any process is started.
    `accept_changes` is stored for the orchestrator, which compares all sources; None keeps the stored value.
    """
    timeout = STOP_TIMEOUT + KILL_TIMEOUT  # the processes of a killed supervisor may still hold the lock
    with open_run(
        config.path, config.identity, fresh=fresh, accept_changes=accept_changes, lock_timeout=timeout
    ) as store:
        if config.shared_path is None and read_state(store) is not None:
            problem = f"{config.path} is a run with a shared directory, where another machine may have continued it"
            raise ConfigInvalid(f"cluster.shared_directory: {problem}; set the key as before")
        if not accept_changes:
            check_environments(store, environments or {})
        if accept_changes is not None:
            store.set_fact(ACCEPT_CHANGES_KEY, accept_changes)
        num_steps, exhausted = store.get_fact(FINISHED_KEY), store.get_fact(EXHAUSTED_KEY)
    if num_steps is None or (num_steps < config.max_steps and exhausted != _dump_curricula(config)):
        return None
    return num_steps


def check_environments(store: RunStore, environments: Mapping[str, dict[str, Any]]) -> None:
    """Raise EnvironmentChanged if an identity differs from the one that is stored for its source."""
    observed = {name: ObservedEnvironment(identity) for name, identity in environments.items()}
    check_no_changes(store, find_changes(store, observed))


def mark_finished(config: RunConfig) -> int:
    """Record that the run is finished, and return its number of steps: fewer than `max_steps` if tasks ran out.

    Raises StorageFailed if the shared storage does not answer.
    """
    with open_run(config.path, config.identity, lock_timeout=READER_TIMEOUT) as store:
        num_steps = Ledger.open(store).progress().committed
        if num_steps < config.max_steps:
            store.set_fact(EXHAUSTED_KEY, _dump_curricula(config))
        store.set_fact(FINISHED_KEY, num_steps)
    replicate_run(config)
    return num_steps


def replicate_run(config: RunConfig) -> None:
    """Copy the changes of a run that has ended to its shared directory, if it has one.

    Raises StorageFailed if the shared storage does not answer.
    """
    if config.shared_path is None:
        return
    with open_run(config.path, config.identity, lock_timeout=READER_TIMEOUT) as store:
        shared, find_group_file = DirectoryStore(config.shared_path), partial(get_top_logprobs_path, config.path)
        run_coroutine(HeadReplicator(store, shared, find_group_file).replicate())


def format_finished(steps: int, config: RunConfig) -> str:
    """Describe the steps of a finished run."""
    if steps < config.max_steps:
        return f"{steps} of {config.max_steps} steps; the curriculum has no more tasks"
    return f"all {config.max_steps} steps" if config.max_steps > 1 else "the only step"


def _dump_curricula(config: RunConfig) -> dict[str, Any]:
    """Return the curricula as plain data."""
    return {source.source_name: source.curriculum.model_dump(mode="json") for source in config.train}
