"""Executes a launch plan: locks the run directory, supervises and displays the processes, records that it finished."""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ramify.core.async_calls import call_storage
from ramify.core.display import open_display
from ramify.core.errors import ProviderError, RamifyError, StorageFailed
from ramify.core.interactive import AwaitableResult, call_interruptible, run_coroutine
from ramify.core.watchdog import WATCHDOG, watch_storage
from ramify.launch.capacity import find_long_path_warning
from ramify.launch.completion import mark_finished, prepare_run_directory, replicate_run
from ramify.launch.dashboard import REFRESH_INTERVAL, RunDisplay
from ramify.launch.disk import estimate_disk
from ramify.launch.head import prepare_head
from ramify.launch.head_leases import hold_leases
from ramify.launch.launcher import Launcher
from ramify.launch.local_launcher import LocalLauncher
from ramify.launch.plan import LaunchPlan
from ramify.launch.process import EarlierProcess
from ramify.launch.published_weights import hold_weights_directory, save_final_weights
from ramify.launch.service_addresses import ServiceAddresses
from ramify.launch.supervisor import RunOutcome, Supervisor
from ramify.run.lock import lock_run
from ramify.run.reader import INTERRUPTED_EVENT, ask_orchestrator
from ramify.run.state import OrchestratorState, ProcessStatus, RunState, SupervisorState
from ramify.run.store import RunStore, storage_call
from ramify.run.store.index import DATABASE_NAME
from ramify.run.store.run_log import RunLog, read_metrics_by_step

ANSWER_TIMEOUT = 2.0  # seconds for the orchestrator to answer the display
CLEANUP_TIMEOUT = 60.0  # seconds for an interrupted supervisor to stop its processes, after the grace period


@dataclass(frozen=True, slots=True)
class RunResult(AwaitableResult):
    """How a run ended. Its results are in its directory: see `ramify metrics`, `plot` and `show`."""

    path: Path
    outcome: RunOutcome
    did_run: bool = True
    """Whether processes were started; False if the run was already finished."""
    steps: int = 0
    """Number of steps of a finished run: fewer than `max_steps` if the tasks ran out."""

    def table(self) -> list[dict[str, Any]]:
        """Return one dict of metrics per step, for `pandas.DataFrame`."""
        return read_metrics_by_step(self.path)


def execute_plan(
    plan: LaunchPlan,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    environments: Mapping[str, dict[str, Any]] | None = None,
    display: RunDisplay,
    launcher: Launcher | None = None,
    is_locked: bool = False,
) -> RunResult:
    """Run the processes of the plan until the run ends; the run directory is locked meanwhile.

    `environments` holds the identities of the sources whose code is on this machine. A changed environment raises
    EnvironmentChanged, unless `accept_changes`. Without a `launcher`, processes are started on this machine.
    `is_locked` says that the caller has locked the run directory.
    """
    config, path, print_line = plan.config, plan.config.path, display.print_line
    launcher = launcher or LocalLauncher()
    with plan.reservation, contextlib.nullcontext() if is_locked else lock_run(path):
        epoch, WATCHDOG.is_ending = 0, False
        if config.shared_path is not None:
            epoch = call_interruptible(
                partial(prepare_head, config, fresh=fresh, accept_changes=accept_changes, print_line=print_line), "head"
            )
            fresh = False
        prepare = partial(
            prepare_run_directory, config, fresh=fresh, accept_changes=accept_changes, environments=environments
        )
        steps = call_interruptible(prepare, "run directory")
        if steps is not None:
            replicate_run(config)  # the storage may have failed at the end of the run
            return RunResult(path, RunOutcome.FINISHED, did_run=False, steps=steps)
        with storage_call(path):
            plan.write()
        leases = hold_leases(path, config.shared_path, epoch, plan.process_specs, launcher, print_line=print_line)
        with hold_weights_directory(config, print_line), leases as earlier:
            try:
                supervision = _supervise(plan, display, launcher, epoch, earlier)
                outcome = run_coroutine(supervision, cleanup_timeout=config.launch.grace_period + CLEANUP_TIMEOUT)
                if outcome is RunOutcome.FINISHED:
                    save_final_weights(config)
                    return RunResult(path, outcome, steps=mark_finished(config))
                if outcome is RunOutcome.INTERRUPTED:
                    _record_end(path, INTERRUPTED_EVENT)
            except KeyboardInterrupt:
                _record_end(path, INTERRUPTED_EVENT)
                raise
            except RamifyError as error:
                if isinstance(error, StorageFailed):  # what follows uses the same storage, and may take long
                    print_line(f"{error.name}: {error.message}")
                _record_end(path, "failed", name=type(error).__name__, message=error.message)
                raise
    return RunResult(path, outcome)


def _record_end(path: Path, kind: str, **fields: str) -> None:
    """Record as an event how the run ended, for `ramify why`, if the store can be opened."""
    with contextlib.suppress(RamifyError), storage_call(path):
        if (path / DATABASE_NAME).is_file():
            with RunStore.open(path) as store:
                RunLog(store).log_event(kind, **fields)


async def _supervise(
    plan: LaunchPlan,
    display: RunDisplay,
    launcher: Launcher,
    epoch: int,
    earlier_processes: Mapping[str, EarlierProcess],
) -> RunOutcome:
    launch, path = plan.config.launch, plan.config.path
    state_file = path / OrchestratorState.FILE  # of an earlier start
    await call_storage(partial(state_file.unlink, missing_ok=True), OrchestratorState.FILE)
    own_state = SupervisorState.begin(path, plan.status_address)
    addresses = ServiceAddresses(path, plan.process_specs)

    def record_statuses(statuses: Sequence[ProcessStatus]) -> None:
        with storage_call(path / SupervisorState.FILE):
            own_state.with_processes(statuses).write(path)
        addresses.update(statuses)

    with _tee_to_log(path / "logs" / "launch.log", display.print_line) as print_line:
        supervisor = Supervisor(
            plan.process_specs,
            max_restarts=launch.max_restarts,
            grace_period=launch.grace_period,
            print_line=print_line,
            on_change=record_statuses,
            launcher=launcher,
            epoch=epoch,
            earlier_processes=earlier_processes,
            head_node=plan.placement.head.name,
        )
        if plan.model is not None and plan.model.experts_note:
            print_line(plan.model.experts_note)
        disk = estimate_disk(plan.config) if plan.model is not None else None
        memory_warning = find_long_path_warning(plan.config, plan.placement.nodes) if plan.model is not None else None
        for warning in filter(None, [disk and disk.find_warning(), memory_warning]):
            print_line(f"warning: {warning}")

        async def get_state() -> RunState:
            read = partial(_read_orchestrator, path, plan.status_address)
            orchestrator = await call_storage(read, OrchestratorState.FILE)
            return RunState(own_state.with_processes(supervisor.get_process_statuses()), orchestrator)

        async with open_display(display, get_state, REFRESH_INTERVAL):
            return await supervisor.run()


def _read_orchestrator(path: Path, address: str) -> OrchestratorState | None:
    """Return the orchestrator's part of the state; while it does not answer, only if it is starting."""
    try:
        return ask_orchestrator(address, timeout=ANSWER_TIMEOUT)
    except ProviderError:
        state = OrchestratorState.read(path)
        return state if state is not None and state.is_starting else None


@contextlib.contextmanager
def _tee_to_log(file: Path, print_line: Callable[[str], None]) -> Generator[Callable[[str], None]]:
    """Yield a function that prints a line and appends it to a log file, with the time."""
    with storage_call(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        log = file.open("a", encoding="utf-8", buffering=1)

    def tee_line(line: str) -> None:
        with contextlib.suppress(OSError), watch_storage(file):  # a full disk is reported by the store, not here
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")
        print_line(line)

    with log:
        yield tee_line
