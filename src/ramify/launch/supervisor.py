"""The supervisor: starts the processes of a run, keeps them alive, and ends with all of them or with a name.

One task tends each process through its lives. The first thing that decides the run ends it, whatever it is: the leader
(the orchestrator) exits, a budget of restarts is used up, a failure that would only repeat itself, Ctrl-C. Then every
process is let go at once, and none outlives this call.

- An exit by signal, or with an exception nobody named, is a crash: the process is started again, within its budget. The
  same exception several times in a row is a bug, and ends the run before the budget does.
- A process that has not answered for its `hang_timeout` is killed, which is a crash like any other.
- A named failure that is not retryable, and any named failure of the leader, ends the run under that name.
- SIGTERM and SIGUSR1 are passed to the leader, which makes a checkpoint and exits with 75, within `grace` seconds.
"""

import asyncio
import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ramify.errors import ConfigInvalid, ProcessDied, RamifyError, failure_classes
from ramify.launch.liveness import get_process_state, wait_for_silence
from ramify.launch.preforked import PreforkClient
from ramify.launch.process import (
    STOP_TIMEOUT,
    ProcessRole,
    ProcessSpec,
    ProcessState,
    SupervisedProcess,
    describe_exit,
    is_signal_exit,
)
from ramify.launch.restart_budget import RestartBudget

EXIT_CONFIG_INVALID = 2  # the exit code of a command whose configuration cannot be used
EXIT_RESUMABLE = 75  # of a run that was asked to leave, and can be continued
MAX_IDENTICAL_CRASHES = 3  # lives in a row that end alike, after which another would too
ALIVE_STATES = (ProcessState.STARTING, ProcessState.READY, ProcessState.SILENT)
FAILURE_LINE = re.compile(r"([A-Z]\w+): (.*)")


class RunOutcome(Enum):
    """How a run ended; the value is the exit code of the command."""

    FINISHED = 0
    STOPPED = EXIT_RESUMABLE
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process as it is now."""

    name: str
    state: ProcessState
    pid: int
    restarts: int
    seconds: float
    """Since its last start."""
    address: str = ""
    log: str = ""


class Supervisor:
    """The processes of one run. `run` it once."""

    def __init__(
        self,
        process_specs: Sequence[ProcessSpec],
        *,
        max_restarts: int,
        grace_period: float,
        stop_timeout: float = STOP_TIMEOUT,
        print_line: Callable[[str], None] = print,
        on_change: Callable[[Sequence[ProcessStatus]], None] | None = None,
        prefork_client: PreforkClient | None = None,
    ) -> None:
        self.process_specs, self.grace_period, self.stop_timeout, self._prefork_client = (
            list(process_specs),
            grace_period,
            stop_timeout,
            prefork_client,
        )
        self._print_line, self._on_change = print_line, on_change
        self._budgets = {entry.name: RestartBudget(max_restarts) for entry in process_specs}
        self._processes: dict[str, SupervisedProcess] = {}
        self._crash_lines: dict[str, list[str]] = {entry.name: [] for entry in process_specs}
        """What each process said last when it crashed by itself, for as long as it is the same."""
        self._leader_restarted = asyncio.Event()
        """Set, and replaced, when the leader begins another life: a follower that was done is needed again."""
        self._stop_task: asyncio.Task[None] | None = None

    async def run(self) -> RunOutcome:
        """Run to the end. Raises what went wrong under its name."""
        self._outcome: asyncio.Future[RunOutcome] = asyncio.get_running_loop().create_future()
        process_tasks = [
            asyncio.create_task(self._keep_running(entry), name=entry.name) for entry in self.process_specs
        ]
        with self._install_signal_handlers():
            try:
                return await self._outcome
            finally:
                tasks = [*process_tasks, *([self._stop_task] if self._stop_task else [])]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(*(process.stop() for process in self._processes.values()))
                self._notify_changed()

    def get_process_statuses(self) -> list[ProcessStatus]:
        """What each process is doing."""
        now = time.monotonic()
        return [self._build_status(entry, self._processes.get(entry.name), now) for entry in self.process_specs]

    def request_stop(self) -> None:
        """Ask the leader for a checkpoint, and end when it is made or `grace` seconds are over."""
        if self._stop_task is None:
            self._print_line(f"asked to leave: making a checkpoint within {self.grace_period:g} s")
            self._stop_task = asyncio.create_task(self._stop_leader(), name="leaving")

    def interrupt(self) -> None:
        """End at once."""
        self._set_outcome(RunOutcome.INTERRUPTED)

    # -- one process -----------------------------------------------------------------------------------------------

    async def _keep_running(self, spec: ProcessSpec) -> None:
        try:
            while True:
                again = self._leader_restarted
                code, process = await self._run_once(spec)
                if spec.role is ProcessRole.FOLLOWER and code == 0:
                    await again.wait()
                    continue
                if not self._should_restart(process, code):
                    return
                await self._wait_before_restart(process, code)
        except RamifyError as error:
            self._set_outcome(error)
        except Exception as error:  # noqa: BLE001 - a bug here must end the run, not leave it without a keeper
            self._set_outcome(error)

    async def _run_once(self, spec: ProcessSpec) -> tuple[int, SupervisedProcess]:
        """One life, from its start to its exit code."""
        process = self._processes[spec.name] = SupervisedProcess(
            spec, stop_timeout=self.stop_timeout, prefork_client=self._prefork_client
        )
        await process.start()
        self._notify_changed()
        exit_task = asyncio.create_task(process.wait_for_exit())
        watching = asyncio.create_task(self._watch(process))
        try:
            await asyncio.wait({exit_task, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not exit_task.done():
                watching.result()
            code = await exit_task
        finally:
            for task in (exit_task, watching):
                task.cancel()
            await asyncio.gather(exit_task, watching, return_exceptions=True)
        await process.stop()
        self._notify_changed()
        return code, process

    async def _watch(self, process: SupervisedProcess) -> None:
        """Wait until a process answers, and kill it if it stops answering. Raises DeadlineExceeded if it never does."""
        await process.wait_until_ready()
        self._notify_changed()
        if process.spec.hang_timeout is None:
            return
        process.silent_seconds = await wait_for_silence(process, self._notify_changed)
        where = f"process {process.pid}, {get_process_state(process.pid)}"
        self._print_line(
            f"{process.spec.name} ({where}) has not answered at {process.spec.address} for "
            f"{process.silent_seconds:.0f} s"
        )
        if process.spec.last_state is not None:
            self._print_line(process.spec.last_state())
        await process.kill()

    def _should_restart(self, process: SupervisedProcess, code: int) -> bool:
        """Whether there is to be another life; what decides the run is decided here."""
        entry = process.spec
        if entry.role is ProcessRole.LEADER and code in (0, EXIT_RESUMABLE):
            self._set_outcome(RunOutcome(code))
            return False
        if code == EXIT_CONFIG_INVALID:
            raise ConfigInvalid(f"{entry.name} cannot be started:\n{process.tail()}")
        failure = parse_failure_from_log(process.tail()) if code == 1 else None
        if failure is not None and (entry.role is ProcessRole.LEADER or not failure.retryable):
            raise failure
        if self._stop_task is not None and entry.role is ProcessRole.LEADER:
            self._print_line(
                f"{entry.name} {_describe_end(process, code)} before a checkpoint was made; the last one holds"
            )
            self._set_outcome(RunOutcome.STOPPED)
            return False
        return True

    async def _wait_before_restart(self, process: SupervisedProcess, code: int) -> None:
        entry, budget = process.spec, self._budgets[process.spec.name]
        alike = self._count_identical_crashes(process, code)
        delay = budget.take_restart() if alike < MAX_IDENTICAL_CRASHES else None
        if delay is None:
            reason = (
                f"{alike} times in a row in the same way"
                if alike >= MAX_IDENTICAL_CRASHES
                else f"after {budget.num_restarts} restarts"
            )
            raise ProcessDied(
                f"{entry.name} {_describe_end(process, code)}, {reason}; the end of {entry.log}:\n{process.tail()}"
            )
        end = _describe_end(process, code)
        self._print_line(
            f"{entry.name} {end}; started again in {delay:g} s ({budget.num_restarts} of {budget.max_restarts})"
        )
        process.state, process.state_since = ProcessState.WAITING, time.monotonic()
        self._notify_changed()
        await asyncio.sleep(delay)
        if entry.role is ProcessRole.LEADER:
            self._leader_restarted.set()
            self._leader_restarted = asyncio.Event()

    def _count_identical_crashes(self, process: SupervisedProcess, code: int) -> int:
        """How many lives in a row have ended by themselves with the same last line."""
        ends, tail = self._crash_lines[process.spec.name], process.tail()
        if is_signal_exit(code) or parse_failure_from_log(tail) is not None:
            ends.clear()
            return 0
        last = tail.splitlines()[-1]
        if ends and ends[-1] != last:
            ends.clear()
        ends.append(last)
        return len(ends)

    # -- the whole -------------------------------------------------------------------------------------------------

    async def _stop_leader(self) -> None:
        leader = next(entry for entry in self.process_specs if entry.role is ProcessRole.LEADER)
        process = self._processes.get(leader.name)
        if process is not None and process.state in ALIVE_STATES:
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(self.grace_period)
        self._print_line("no checkpoint was made; the last one holds")
        self._set_outcome(RunOutcome.STOPPED)

    def _set_outcome(self, outcome: RunOutcome | BaseException) -> None:
        """The first decision counts."""
        if self._outcome.done():
            return
        if isinstance(outcome, RunOutcome):
            self._outcome.set_result(outcome)
        else:
            self._outcome.set_exception(outcome)

    def _notify_changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.get_process_statuses())

    def _build_status(self, spec: ProcessSpec, process: SupervisedProcess | None, now: float) -> ProcessStatus:
        restarts = self._budgets[spec.name].num_restarts
        if process is None:
            return ProcessStatus(spec.name, ProcessState.WAITING, 0, restarts, 0.0, spec.address, str(spec.log))
        pid = process.pid if process.state in ALIVE_STATES else 0
        return ProcessStatus(
            spec.name, process.state, pid, restarts, now - process.state_since, spec.address, str(spec.log)
        )

    @contextlib.contextmanager
    def _install_signal_handlers(self) -> Iterator[None]:
        """Our handlers, where there can be any: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGINT: self.interrupt, signal.SIGTERM: self.request_stop, signal.SIGUSR1: self.request_stop}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)


def _describe_end(process: SupervisedProcess, code: int) -> str:
    """Return how a process ended, as the end of a sentence."""
    if process.silent_seconds is None:
        return describe_exit(code)
    return f"did not answer for {process.silent_seconds:.0f} s and was killed"


def parse_failure_from_log(log_tail: str) -> RamifyError | None:
    """The failure that a command named last, as `ramify` does; None for any other end."""
    lines = log_tail.splitlines()
    first = 0 if not any(line.startswith("Traceback") for line in lines) else len(lines) - 1
    for at in range(len(lines) - 1, first - 1, -1):
        found = FAILURE_LINE.fullmatch(lines[at])
        known = failure_classes().get(found[1]) if found else None
        if found and known:
            return known("\n".join([found[2], *lines[at + 1 :]]))
    return None
