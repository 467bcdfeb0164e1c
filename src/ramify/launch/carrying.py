"""A plan carried out: the run's directory claimed, its processes supervised and shown, its end remembered."""

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.errors import ProviderError, RamifyError, RunBusy
from ramify.interactive import AwaitableResult, run_coroutine
from ramify.launch.dashboard import EVERY, Display
from ramify.launch.finished import finish, steps_of
from ramify.launch.newest import keep_newest, weights_held
from ramify.launch.nursery import Nursery
from ramify.launch.plan import Plan
from ramify.launch.record import Record
from ramify.launch.status import StatusClient
from ramify.launch.supervisor import Outcome, Supervisor
from ramify.store import RunStore, wrap_storage_errors
from ramify.store.index import DATABASE_NAME
from ramify.store.locks import describe_holders, write_holder
from ramify.store.run_log import RunLog, read_metrics_by_step

CLAIM = "lock"  # how the name of its lock ends


@dataclass(frozen=True, slots=True)
class Ended(AwaitableResult):
    """How a run ended. What it found is in its directory: `ramify metrics`, `plot`, `show`."""

    path: Path
    outcome: Outcome
    ran: bool = True
    """Whether anything was started; False for a run that was finished already."""
    steps: int = 0
    """Of a run that is finished: fewer than `max_steps` where no task was left."""

    def table(self) -> list[dict[str, Any]]:
        """Return one plain dict of metrics for each step, for `pandas.DataFrame`."""
        return read_metrics_by_step(self.path)


def carry_out(
    plan: Plan,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    environments: Mapping[str, dict[str, Any]] | None = None,
    display: Display,
    nursery: Nursery | None = None,
) -> Ended:
    """Do what the plan says, in the run's directory, which is this supervisor's alone until it is done.

    `environments` are the identities of the sources whose code is on this machine; a change is refused unless
    `accept_changes`.
    """
    config, path = plan.config, plan.config.path
    with plan.reservation, claim(path):
        steps = steps_of(config, fresh=fresh, accept_changes=accept_changes, environments=environments)
        if steps is not None:
            return Ended(path, Outcome.FINISHED, ran=False, steps=steps)
        with wrap_storage_errors(path):
            plan.write()
        with weights_held(config):
            try:
                outcome = run_coroutine(_supervised(plan, display, nursery))
            except RamifyError as error:
                _record_failure(path, error)
                raise
            if outcome is Outcome.FINISHED:
                keep_newest(config)
                return Ended(path, outcome, steps=finish(config))
    return Ended(path, outcome)


def _record_failure(path: Path, error: RamifyError) -> None:
    """Record under which name the run ended, for `ramify why`. A store that cannot be opened is left alone."""
    if (path / DATABASE_NAME).is_file():
        with contextlib.suppress(RamifyError), RunStore.open(path) as store:
            RunLog(store).log_event("failed", name=type(error).__name__, message=error.message)


async def _supervised(plan: Plan, display: Display, nursery: Nursery | None) -> Outcome:
    launch, path = plan.config.launch, plan.config.path
    record = Record(path, plan.status)
    with _logged(path / "logs" / "launch.log", display.say) as say:
        supervisor = Supervisor(
            plan.entries,
            restarts=launch.restarts,
            grace=launch.grace,
            say=say,
            changed=record.write,
            nursery=nursery,
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
    with wrap_storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        log = file.open("a", encoding="utf-8", buffering=1)

    def both(line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the run has other ways to find out
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")
        say(line)

    with log:
        yield both


@contextlib.contextmanager
def claim(path: Path) -> Iterator[None]:
    """Hold the run for one supervisor; raise RunBusy if another has it.

    The lock file lies beside the directory, because `--fresh` renames the directory.
    """
    with wrap_storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.parent / f".{path.name}.{CLAIM}", os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(handle):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holders = describe_holders(handle)
            by = f", {holders}" if holders else ""
            raise RunBusy(f"{path} is already being run by another `ramify rl`{by}") from None
        write_holder(handle)
        yield
