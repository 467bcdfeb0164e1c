"""Executes a launch plan: locks the run directory, supervises and displays the processes, records that it finished.

How long the processes of a head may outlive it is recorded where the next head finds it:

    leases/<k>   for each process of head k on a node: seconds after which it is dead for certain without its head

A head writes its file before it starts a process, and removes it when it has seen all of them end: a file that is left
belongs to a head that was lost, or that still runs. A later head counts these seconds from when it reads the file, and
waits POLL_INTERVAL longer, because the old head may renew leases until it reads the new term.
"""

import contextlib
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ramify.core.async_calls import call_storage
from ramify.core.display import open_display
from ramify.core.errors import ProviderError, RamifyError, StorageFailed
from ramify.core.files import write_atomically
from ramify.core.interactive import AwaitableResult, call_interruptible, run_coroutine
from ramify.core.watchdog import WATCHDOG, watch_storage
from ramify.launch.dashboard import REFRESH_INTERVAL, RunDisplay
from ramify.launch.head import check_newest_head, prepare_head
from ramify.launch.launcher import Launcher, ProcessSpec
from ramify.launch.local_launcher import LocalLauncher
from ramify.launch.plan import LaunchPlan
from ramify.launch.published_weights import hold_weights_directory, save_final_weights
from ramify.launch.run_directory import mark_finished, prepare_run_directory, replicate_run
from ramify.launch.supervised_process import EarlierProcess
from ramify.launch.supervisor import ALIVE_STATES, RunOutcome, Supervisor
from ramify.orchestrate.address_book import ADDRESS_BOOK_FILE, write_addresses
from ramify.run.fencing.token import FencingToken
from ramify.run.reader import INTERRUPTED_EVENT, ask_orchestrator
from ramify.run.state import OrchestratorState, ProcessState, ProcessStatus, RunState, SupervisorState
from ramify.run.store import RunStore, storage_call
from ramify.run.store.head_replication import POLL_INTERVAL
from ramify.run.store.index import DATABASE_NAME
from ramify.run.store.run_log import RunLog, read_metrics_by_step
from ramify.run.supervisor_lock import lock_run

LEASES_DIR = "leases"  # in the shared directory
EXITED_STATES = (ProcessState.WAITING, ProcessState.ENDED)  # of processes that do not run


@contextlib.contextmanager
def hold_leases(
    run: Path,
    shared: Path | None,
    term: int,
    specs: Sequence[ProcessSpec],
    launcher: Launcher,
    *,
    print_line: Callable[[str], None] = print,
) -> Generator[dict[str, EarlierProcess]]:
    """Record the leases of the processes until all have ended, and yield processes of earlier supervisors that may run.

    Raises ProcessReplaced if another head has taken over, and StorageFailed if the processes of the last supervisor
    are not known, which may still run on nodes.
    """
    if launcher.can_lose_nodes:
        SupervisorState.load(run)
    earlier = read_earlier_processes(run)
    delays = {spec.name: spec.placement.lease.replacement_delay for spec in specs if spec.placement is not None}
    if shared is None or not launcher.can_lose_nodes:
        yield earlier
        return
    directory = shared / LEASES_DIR
    with storage_call(directory):
        earlier_heads = _record_leases(directory, term, delays)
    check_newest_head(run)  # after the file was written: otherwise a new head might not have seen it
    try:
        yield {**earlier_heads, **earlier}
    finally:
        state = SupervisorState.read(run)
        is_recorded = state is not None and state.pid == os.getpid()
        if is_recorded and not any(process.replacement_delay for process in read_earlier_processes(run).values()):
            try:
                _remove_leases(directory, term)
            except OSError as error:  # the next head waits, which does no harm
                print_line(f"the leases of this head were not removed: {error}")


def read_earlier_processes(run: Path) -> dict[str, EarlierProcess]:
    """Return the processes with a token that the last supervisor of a run has started, by name."""
    state = SupervisorState.read(run)
    rows = state.processes if state is not None else {}
    return {
        name: EarlierProcess(
            FencingToken.parse(row.token), None if row.state in EXITED_STATES else row.replacement_delay
        )
        for name, row in rows.items()
        if row.token
    }


def _record_leases(directory: Path, term: int, delays: Mapping[str, float]) -> dict[str, EarlierProcess]:
    """Write the file of a head, and return the processes that heads of earlier terms may have left, by name."""
    *earlier_delays, own_delays = (_read_delays(directory, number) for number in range(term + 1))
    directory.mkdir(exist_ok=True)
    write_atomically(_get_lease_file(directory, term), msgspec.json.encode(_merge_delays(own_delays, delays)))
    return {  # a head that still runs notices after POLL_INTERVAL that it was replaced
        name: EarlierProcess(FencingToken(term - 1), replacement_delay=delay + POLL_INTERVAL)
        for name, delay in _merge_delays(*earlier_delays).items()
    }


def _remove_leases(directory: Path, term: int) -> None:
    """Remove the files of a head and of those before it."""
    for number in range(term + 1):
        with watch_storage(directory):
            _get_lease_file(directory, number).unlink(missing_ok=True)


def _merge_delays(*tables: Mapping[str, float]) -> dict[str, float]:
    """Return the longest delay of each process."""
    return {name: max(table.get(name, 0.0) for table in tables) for name in dict.fromkeys(chain(*tables))}


def _read_delays(directory: Path, term: int) -> dict[str, float]:
    path = _get_lease_file(directory, term)
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        advice = f"remove it when no process of term {term} runs any more"
        raise StorageFailed(f"{path} is damaged: {error}; {advice}") from error


def _get_lease_file(directory: Path, term: int) -> Path:
    return directory / str(term)


class ServiceAddresses:
    """Writes the address book of one run whenever an address has changed; a run without services has none."""

    def __init__(self, run_directory: Path, specs: Sequence[ProcessSpec]) -> None:
        """Remove the address book of an earlier start, whose processes are gone."""
        self._run_directory = run_directory
        self._services = {spec.name: spec.service for spec in specs if spec.service}
        self._written: dict[str, list[str]] = {}
        with storage_call(run_directory):
            (run_directory / ADDRESS_BOOK_FILE).unlink(missing_ok=True)

    def update(self, statuses: Sequence[ProcessStatus]) -> None:
        """Write the addresses of the processes that run or are being started, by service."""
        addresses: dict[str, list[str]] = {}
        for status in statuses:
            if status.name in self._services and status.address and status.state in ALIVE_STATES:
                url = urlsplit(status.address)
                addresses.setdefault(self._services[status.name], []).append(f"{url.scheme}://{url.netloc}")
        if addresses != self._written:
            with storage_call(self._run_directory):
                write_addresses(self._run_directory, addresses)
            self._written = addresses


ANSWER_TIMEOUT = 2.0  # seconds for the orchestrator to answer the display
CLEANUP_TIMEOUT = 60.0  # seconds for an interrupted supervisor to stop its processes, after the grace period


@dataclass(frozen=True, slots=True)
class RunResult(AwaitableResult):
    """How a run ended. Its results are in its directory: see `ramify metrics`, `plot` and `show`."""

    path: Path
    outcome: RunOutcome
    did_run: bool = True  # whether processes were started; False if the run was already finished
    steps: int = 0  # number of steps of a finished run: fewer than `max_steps` if the tasks ran out

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
    lock = contextlib.nullcontext() if is_locked else lock_run(path)
    with plan.reservation, lock, contextlib.ExitStack() as stack:
        term = 0
        stack.callback(setattr, WATCHDOG, "is_ending", False)  # of the next run in this process
        if config.shared_path is not None:
            term = call_interruptible(
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
        leases = hold_leases(path, config.shared_path, term, plan.process_specs, launcher, print_line=print_line)
        with hold_weights_directory(config, print_line), leases as earlier:
            try:
                supervision = _supervise(plan, display, launcher, term, earlier)
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
    term: int,
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
            term=term,
            earlier_processes=earlier_processes,
            head_node=plan.placement.head.name,
        )
        if plan.model is not None and plan.model.experts_note:
            print_line(plan.model.experts_note)
        for warning in plan.list_warnings():
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
