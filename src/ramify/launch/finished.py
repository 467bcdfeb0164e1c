"""Whether a run has all its steps, which its directory remembers."""

import time
from collections.abc import Callable

from ramify.errors import RunBusy
from ramify.launch.process import KILLING, PATIENCE, POLL
from ramify.orchestrate.config import RunConfig
from ramify.store import RunStore, open_run

FINISHED = "finished"  # the fact that says up to which step


def has_all_steps(config: RunConfig, *, fresh: bool = False) -> bool:
    """Whether the run has all its steps. Its directory is made or checked; `fresh` moves an old one aside."""
    with _let_go_of(lambda: open_run(config.path, config.identity, fresh=fresh)) as store:
        done = store.fact(FINISHED)
    return done is not None and done >= config.max_steps


def finish(config: RunConfig) -> None:
    """Remember that the run has all its steps."""
    with open_run(config.path, config.identity) as store:
        store.remember(FINISHED, config.max_steps)


def _let_go_of(opening: Callable[[], RunStore]) -> RunStore:
    """The run, once the processes of a supervisor that was killed have let go of it."""
    end = time.monotonic() + PATIENCE + KILLING
    while True:
        try:
            return opening()
        except RunBusy:
            if time.monotonic() > end:
                raise
        time.sleep(POLL)
