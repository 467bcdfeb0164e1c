"""Whether a run has all its steps, which its directory remembers."""

from ramify.launch.process import KILLING, PATIENCE
from ramify.orchestrate.config import RunConfig
from ramify.store import open_run

FINISHED = "finished"  # the fact that says up to which step
READERS = 60.0  # seconds for whoever reads a run that has just ended


def has_all_steps(config: RunConfig, *, fresh: bool = False) -> bool:
    """Whether the run has all its steps. Its directory is made or checked; `fresh` moves an old one aside."""
    killed = PATIENCE + KILLING  # for the processes of a supervisor that was killed
    with open_run(config.path, config.identity, fresh=fresh, patience=killed) as store:
        done = store.fact(FINISHED)
    return done is not None and done >= config.max_steps


def finish(config: RunConfig) -> None:
    """Remember that the run has all its steps."""
    with open_run(config.path, config.identity, patience=READERS) as store:
        store.remember(FINISHED, config.max_steps)
