"""Whether a run has all its steps, or all that its tasks are enough for, which its directory remembers."""

from collections.abc import Mapping
from typing import Any

from ramify.launch.process import KILL_TIMEOUT, STOP_TIMEOUT
from ramify.orchestrate.config import RunConfig
from ramify.store import open_run
from ramify.store.environments import ACCEPT_CHANGES_KEY, ObservedEnvironment, check_no_changes, find_changes
from ramify.store.ledger import Ledger

FINISHED_KEY = "finished"  # the fact that says up to which step
EXHAUSTED_KEY = "exhausted"  # the fact that says which curricula had no task left then
READER_TIMEOUT = 60.0  # seconds for whoever reads a run that has just ended


def get_finished_steps(
    config: RunConfig,
    *,
    fresh: bool = False,
    accept_changes: bool | None = None,
    environments: Mapping[str, dict[str, Any]] | None = None,
) -> int | None:
    """Return the steps of a run that is finished; None for any other.

    The run's directory is created or checked; `fresh` moves an old one aside. `environments` are the identities of the
    sources whose code is on this machine: a change is refused here, before any process is started. `accept_changes` is
    stored for the orchestrator, which compares all sources; True accepts the changes, None leaves the stored value.
    """
    killed = STOP_TIMEOUT + KILL_TIMEOUT  # for the processes of a supervisor that was killed
    with open_run(
        config.path, config.identity, fresh=fresh, accept_changes=accept_changes, lock_timeout=killed
    ) as store:
        if not accept_changes:
            observed = {name: ObservedEnvironment(identity) for name, identity in (environments or {}).items()}
            check_no_changes(store, find_changes(store, observed))
        if accept_changes is not None:
            store.set_fact(ACCEPT_CHANGES_KEY, accept_changes)
        done, exhausted = store.get_fact(FINISHED_KEY), store.get_fact(EXHAUSTED_KEY)
    if done is None or (done < config.max_steps and exhausted != _dump_curricula(config)):
        return None
    return done


def mark_finished(config: RunConfig) -> int:
    """Remember that the run is finished; returns its steps, which are fewer where its tasks have ended."""
    with open_run(config.path, config.identity, lock_timeout=READER_TIMEOUT) as store:
        done = Ledger.open(store).progress().committed
        if done < config.max_steps:
            store.set_fact(EXHAUSTED_KEY, _dump_curricula(config))
        store.set_fact(FINISHED_KEY, done)
    return done


def format_finished(steps: int, config: RunConfig) -> str:
    """What a finished run has, in words."""
    if steps < config.max_steps:
        return f"{steps} of {config.max_steps} steps are there, and no task is left"
    return f"all {config.max_steps} steps are there"


def _dump_curricula(config: RunConfig) -> dict[str, Any]:
    return {source.source_name: source.curriculum.model_dump(mode="json") for source in config.train}
