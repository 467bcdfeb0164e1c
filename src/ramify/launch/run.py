"""A run from its configuration to its end: check, plan, claim the directory, supervise, say how it ended."""

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.config import check
from ramify.errors import ProviderError, RunBusy
from ramify.launch.dashboard import EVERY, Display, Quiet
from ramify.launch.newest import keep_newest, weights_held
from ramify.launch.plan import Plan, plan_of
from ramify.launch.process import KILLING, PATIENCE, POLL
from ramify.launch.record import Record
from ramify.launch.status import StatusClient
from ramify.launch.supervisor import Outcome, Supervisor
from ramify.launch.tables import check_tables
from ramify.monitor import check_sinks
from ramify.orchestrate.config import RunConfig
from ramify.store import RunStore, naming, open_run

FINISHED = "finished"  # the fact that says up to which step
CLAIM = "lock"  # how the name of its lock ends


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended. What it found is in its directory: `ramify metrics`, `plot`, `show`."""

    path: Path
    outcome: Outcome
    ran: bool = True
    """Whether anything was started; False for a run that was finished already."""


def rl(config: RunConfig | Mapping[str, Any], *, fresh: bool = False, display: Display | None = None) -> Ended:
    """Train, or go on training, until `max_steps`. Raises what went wrong under its name. `fresh` begins anew."""
    checked = config if isinstance(config, RunConfig) else check(RunConfig, dict(config), at="run")
    check_sinks(checked)
    plan = plan_of(checked)
    check_tables(checked)
    return carry_out(plan, fresh=fresh, display=display or Quiet())


def carry_out(plan: Plan, *, fresh: bool = False, display: Display) -> Ended:
    """Do what the plan says, in the run's directory, which is this supervisor's alone until it is done."""
    config, path = plan.config, plan.config.path
    with _claimed(path):
        if has_all_steps(config, fresh=fresh):
            return Ended(path, Outcome.FINISHED, ran=False)
        with naming(path):
            plan.write()
        with weights_held(config):
            outcome = asyncio.run(_supervised(plan, display))
            if outcome is Outcome.FINISHED:
                keep_newest(config)
                finish(config)
    return Ended(path, outcome)


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


async def _supervised(plan: Plan, display: Display) -> Outcome:
    launch, path = plan.config.launch, plan.config.path
    record = Record(path, plan.status)
    with _logged(path / "logs" / "launch.log", display.say) as say:
        supervisor = Supervisor(
            plan.entries, restarts=launch.restarts, grace=launch.grace, say=say, changed=record.write
        )
        async with _shown(supervisor, StatusClient(plan.status, patience=2.0), display):
            return await supervisor.run()


@contextlib.asynccontextmanager
async def _shown(supervisor: Supervisor, client: StatusClient, display: Display) -> AsyncIterator[None]:
    async def look() -> None:
        while True:
            try:
                status = await client.look()
            except ProviderError:
                status = None
            display.look(status, supervisor.processes())
            await asyncio.sleep(EVERY)

    with display:
        looking = asyncio.create_task(look(), name="dashboard")
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


@contextlib.contextmanager
def _logged(file: Path, say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """What the supervisor says, to people and to a log."""
    with naming(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        log = file.open("a", encoding="utf-8", buffering=1)

    def both(line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the run has other ways to find out
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")
        say(line)

    with log:
        yield both


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """One supervisor for a run: held beside the directory, which may be moved, until this process is gone."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.parent / f".{path.name}.{CLAIM}", os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(handle):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusy(f"{path} is already being run by another `ramify rl`") from None
        yield
