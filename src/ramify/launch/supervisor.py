"""The supervisor starts the processes of a run, restarts them when they crash, and stops all of them at the end.

One task supervises each process through all its restarts. The first of these events ends the run: the exit of the
leader (the orchestrator), a used-up restart budget, or a failure that a restart cannot fix. Then all processes are
stopped at once; none outlives the supervisor.

- An exit by signal, or with an unknown exception, is a crash: the process is restarted, within its budget. The same
  exception several times in a row is a bug, and ends the run before the budget does.
- A process on the head that has not answered for its `hang_timeout` is killed and handled like a crash.
- A Ramify failure that is not retryable, and any Ramify failure of the leader, ends the run with that failure.
- SIGTERM, SIGUSR1 and the first Ctrl-C are passed to the leader as SIGTERM. It saves a checkpoint and exits with
  EXIT_RESUMABLE within `grace_period` seconds. Another Ctrl-C ends the run at once.
"""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import msgspec

from ramify.core.async_calls import call_storage, cancel_all
from ramify.core.errors import ConfigInvalid, DeadlineExceeded, ProcessDied, RamifyError
from ramify.core.watchdog import WATCHDOG
from ramify.launch.launcher import Launcher, ProcessRole, ProcessSpec
from ramify.launch.local_launcher import LocalLauncher
from ramify.launch.supervised_process import (
    FIRST_DELAY,
    RESTART_WINDOW,
    EarlierProcess,
    RestartBudget,
    SupervisedProcess,
    wait_for_silence,
    watch_reachability,
)
from ramify.orchestrate.run_config import EXIT_RESUMABLE
from ramify.processes.child import STOP_TIMEOUT
from ramify.processes.exit import describe_exit, is_signal_exit
from ramify.run.fencing.lease import LeaseTerms, RoleLeases, read_lease_clock
from ramify.run.fencing.token import FencingToken
from ramify.run.reader import get_process_state
from ramify.run.state import ProcessState, ProcessStatus

MAX_IDENTICAL_CRASHES = 3  # in a row, after which another restart would not help
ALIVE_STATES = (ProcessState.STARTING, ProcessState.READY, ProcessState.SILENT)


class RunOutcome(Enum):
    """How a run ended; the value is the exit code of `ramify rl`."""

    FINISHED = 0
    STOPPED = EXIT_RESUMABLE
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """Delays and timeouts of a supervisor, in seconds."""

    first_restart_delay: float = FIRST_DELAY
    """Delay before the first restart of a process; each further one takes twice as long."""
    restart_window: float = RESTART_WINDOW
    """Identical crashes with more time between them are not a bug: hardware may fail in the same way once a day."""
    place_retry_delay: float = 30.0
    """Delay before another try to find a place for a process that the run can do without."""
    max_probe_interval: float = 5.0
    """Time between two requests to a process on the head, and the timeout of each; less for a short `hang_timeout`."""
    reachability_interval: float = 1.0
    """Time between two checks of whether the nodes of a process can be reached."""


class _Crash(NamedTuple):
    last_line: str  # of the log
    time: float  # of the monotonic clock


OnChange = Callable[[Sequence[ProcessStatus]], None]


class Supervisor:
    """Supervises the processes of one run. Call `run` once.

    `max_restarts` is per process and hour. `print_line` gets messages for the user, `on_change` the status of all
    processes after every change, in a thread of its own. `earlier_processes` were started by earlier supervisors and
    heads: one of them that may still run on a node is replaced when its lease has ended. `term` is this head's, and
    part of the tokens of its processes. `head_node` is the name of this machine in the cluster.
    """

    def __init__(
        self,
        process_specs: Sequence[ProcessSpec],
        *,
        max_restarts: int,
        grace_period: float,
        print_line: Callable[[str], None] = print,
        on_change: OnChange | None = None,
        launcher: Launcher | None = None,
        earlier_processes: Mapping[str, EarlierProcess] | None = None,
        term: int = 0,
        head_node: str = "",
        settings: SupervisorSettings | None = None,
    ) -> None:
        self._settings = settings = settings or SupervisorSettings()
        self.process_specs, self.grace_period, self.term = list(process_specs), grace_period, term
        self._print_line, self._on_change, self._launcher = print_line, on_change, launcher or LocalLauncher()
        self._head_node = head_node
        self._leases: dict[str, RoleLeases] = {}
        self._earlier_processes = earlier_processes or {}
        self._budgets = {
            spec.name: RestartBudget(max_restarts, first_delay=settings.first_restart_delay) for spec in process_specs
        }
        self._processes: dict[str, SupervisedProcess] = {}
        # The consecutive crashes of each process, as long as they are identical.
        self._crashes: dict[str, list[_Crash]] = {spec.name: [] for spec in process_specs}
        # Set and replaced when the leader restarts: a follower that was done is needed again.
        self._leader_restarted = asyncio.Event()
        # Set when a process has a place for the first time, or the run starts without it.
        self._placed = {spec.name: asyncio.Event() for spec in process_specs}
        self._stop_task: asyncio.Task[None] | None = None
        self._stop_outcome = RunOutcome.STOPPED  # of a run that ends after `request_stop`
        self._num_reports = self._last_report = 0  # calls of `on_change`
        self._report_lock = threading.Lock()

    async def run(self) -> RunOutcome:
        """Run until the run ends. Raises the failure that ends it."""
        self._outcome: asyncio.Future[RunOutcome] = asyncio.get_running_loop().create_future()
        process_tasks = [asyncio.create_task(self._keep_running(spec), name=spec.name) for spec in self.process_specs]
        with self._install_signal_handlers():
            try:
                return await asyncio.shield(self._outcome)
            except asyncio.CancelledError:  # the interrupt of a notebook, whose cell runs in another thread
                self.interrupt()
                await self._outcome
                raise
            finally:
                await cancel_all([*process_tasks, *([self._stop_task] if self._stop_task else [])])
                try:
                    if self._has_finished:
                        await self._stop_followers()
                finally:
                    await self._stop_all()
                    self._report_unstopped()
                    await self._notify_ended()

    @property
    def _has_finished(self) -> bool:
        outcome = self._outcome
        return outcome.done() and outcome.exception() is None and outcome.result() is RunOutcome.FINISHED

    async def _stop_followers(self) -> None:
        """Let the followers of a finished run end within `grace_period`: the trainer may still write its weights."""
        alive = [process for process in self._processes.values() if process.state in ALIVE_STATES and process.slots]
        followers = [process for process in alive if process.spec.role is ProcessRole.FOLLOWER]
        if not followers:
            return
        for process in followers:
            process.send_signal(signal.SIGTERM)
        exits = [asyncio.create_task(process.wait_for_exit()) for process in followers]
        _, late = await asyncio.wait(exits, timeout=min(STOP_TIMEOUT, self.grace_period))
        if late:
            self._print_line(f"finished; waiting up to {self.grace_period:g} s for the last weights to be written")
            _, late = await asyncio.wait(late, timeout=self.grace_period)
        if late:
            self._print_line("the newest weights may be older than the last checkpoint, which has them")
        await cancel_all(exits)

    async def _stop_all(self) -> None:
        """Stop all processes. An error is printed and does not replace the outcome of the run."""
        processes = list(self._processes.values())
        results = await asyncio.gather(*(process.stop() for process in processes), return_exceptions=True)
        for process, result in zip(processes, results):
            if isinstance(result, BaseException):
                self._print_line(f"{process.spec.name} could not be stopped: {type(result).__name__}: {result}")

    def get_process_statuses(self) -> list[ProcessStatus]:
        """Return the status of every process."""
        now = time.monotonic()
        return [self._build_status(spec, self._processes.get(spec.name), now) for spec in self.process_specs]

    def request_stop(self, outcome: RunOutcome = RunOutcome.STOPPED) -> None:
        """Ask the leader to save a checkpoint, and end the run when it exits or after `grace_period` seconds."""
        if self._stop_task is None:
            wait = f"waiting up to {self.grace_period:g} s for a checkpoint; Ctrl-C ends the run at once"
            self._print_line(f"stopping: {wait}")
            self._stop_outcome = outcome
            self._stop_task = asyncio.create_task(self._stop_leader(), name="stop")

    def interrupt(self) -> None:
        """Request a stop; if the run is being stopped, end it at once."""
        if self._stop_task is None:
            self.request_stop(RunOutcome.INTERRUPTED)
        else:
            self._set_outcome(RunOutcome.INTERRUPTED)

    # -- one process -----------------------------------------------------------------------------------------------

    async def _keep_running(self, spec: ProcessSpec) -> None:
        try:
            while True:
                leader_restarted = self._leader_restarted
                code, process = await self._run_once(spec)
                if spec.role is ProcessRole.FOLLOWER and code == 0:
                    await leader_restarted.wait()
                    continue
                if not self._should_restart(process, code):
                    return
                await self._wait_before_restart(process, code)
        except Exception as error:  # noqa: BLE001 - a bug here must end the run, not leave a process unsupervised
            self._set_outcome(error)

    async def _run_once(self, spec: ProcessSpec) -> tuple[int, SupervisedProcess]:
        """Run a process from its start to its exit, and return the exit code."""
        process = SupervisedProcess(spec, self._launcher, await self._begin_incarnation(spec))
        self._processes[spec.name] = process
        for name in spec.start_after:
            await self._placed[name].wait()
        await self._open(process)
        if spec.placement is not None:
            await self._notify_changed()  # its address and token are recorded before they are used
        await process.start()
        await self._notify_changed()
        exit_task = asyncio.create_task(process.wait_for_exit())
        watch_task = asyncio.create_task(self._watch(process))
        try:
            await asyncio.wait({exit_task, watch_task}, return_when=asyncio.FIRST_COMPLETED)
            if not exit_task.done():
                watch_task.result()
            code = await exit_task
        finally:
            await cancel_all([exit_task, watch_task])
        await process.stop()
        await self._notify_changed()
        return code, process

    async def _open(self, process: SupervisedProcess) -> None:
        """Open the slots of a process.

        If they cannot be opened, retry every `place_retry_delay` seconds while another process of the same service
        runs; otherwise raise DeadlineExceeded or ProcessDied.
        """
        spec = process.spec
        while True:
            try:
                await process.open()
            except (DeadlineExceeded, ProcessDied) as error:
                if not self._has_running_peer(spec):
                    raise
                self._print_line(f"{error.message}; the run continues without {spec.name}, which is tried again")
            self._placed[spec.name].set()
            if process.slots:
                if process.state is ProcessState.WAITING:
                    process.set_state(ProcessState.STARTING)
                return
            process.set_state(ProcessState.WAITING)
            await self._notify_changed()
            await asyncio.sleep(self._settings.place_retry_delay)

    def _has_running_peer(self, spec: ProcessSpec) -> bool:
        """Return whether another process of the same service has a place."""
        peers = [peer.name for peer in self.process_specs if spec.service and peer.service == spec.service]
        processes = [self._processes.get(name) for name in peers if name != spec.name]
        return any(process is not None and process.slots and process.state in ALIVE_STATES for process in processes)

    async def _begin_incarnation(self, spec: ProcessSpec) -> RoleLeases:
        """Return the leases of the next execution of a process, when no earlier one can run any more."""
        leases = self._leases.get(spec.name)
        if leases is None:
            terms = spec.placement.lease if spec.placement is not None else LeaseTerms()
            token = await self._wait_for_earlier(spec)
            leases = RoleLeases(spec.name, token, terms, num_ranks=spec.num_ranks, now=read_lease_clock())
            self._leases[spec.name] = leases
            return leases
        await self._wait_until_dead(leases.replaceable_at, spec)
        leases.replace(read_lease_clock())
        return leases

    async def _wait_for_earlier(self, spec: ProcessSpec) -> FencingToken:
        """Return the first token of a process, when one that an earlier supervisor has started cannot run any more."""
        earlier = self._earlier_processes.get(spec.name)
        if earlier is None:
            return FencingToken(self.term)
        if earlier.replacement_delay is not None:  # its lease may have been renewed just now
            await self._wait_until_dead(read_lease_clock() + earlier.replacement_delay, spec)
        return max(earlier.token.next_incarnation(), FencingToken(self.term))

    async def _wait_until_dead(self, dead_at: float, spec: ProcessSpec) -> None:
        """Wait until a process that may still run is dead for certain, at `dead_at` on the clock of leases."""
        if (seconds := dead_at - read_lease_clock()) > 0:
            self._print_line(f"{spec.name} may still run on a node that is not reachable; starting in {seconds:.0f} s")
        while (seconds := dead_at - read_lease_clock()) > 0:
            await asyncio.sleep(seconds)

    async def _watch(self, process: SupervisedProcess) -> None:
        """Wait until a process is ready, then watch it. Raises DeadlineExceeded if it never is.

        A process on the head is killed if it stops answering; for one on a node, a silent node is reported.
        """
        await process.wait_until_ready()
        await self._notify_changed()
        if process.spec.placement is not None:
            interval = self._settings.reachability_interval
            await watch_reachability(process, lambda: self._report_reachability(process), interval=interval)
        elif process.spec.hang_timeout is not None:
            max_interval = self._settings.max_probe_interval
            process.silent_seconds = await wait_for_silence(process, self._notify_changed, max_interval=max_interval)
            await self._kill_silent(process)

    async def _kill_silent(self, process: SupervisedProcess) -> None:
        """Print what is known about a process on the head that no longer answers, and kill it."""
        spec = process.spec
        label = f"{spec.name} (process {process.pid}, {get_process_state(process.pid)})"
        self._print_line(f"{label} has not answered at {process.address} for {process.silent_seconds:.0f} s")
        if spec.last_state is not None:
            self._print_line(await call_storage(spec.last_state, f"last state of {spec.name}"))
        await process.kill()

    async def _report_reachability(self, process: SupervisedProcess) -> None:
        """Print that a node cannot be reached, or can be again, and report the new state of its process."""
        name, node = process.spec.name, process.unreachable_node
        if node and node == self._head_node:
            advice = "check `ray status`; if Ray has ended, press Ctrl-C, start Ray again and repeat the command"
            self._print_line(f"{name}: its node {node}, which is this machine, does not answer; {advice}")
        elif node:
            self._print_line(f"{name}: its node {node} does not answer; {name} is replaced when its lease has ended")
        else:
            self._print_line(f"{name}: its node answers again")
        await self._notify_changed()

    def _should_restart(self, process: SupervisedProcess, code: int) -> bool:
        """Return whether a process that exited is restarted; if not, the run ends with an outcome or a failure."""
        spec, is_leader = process.spec, process.spec.role is ProcessRole.LEADER
        if is_leader and code in (0, EXIT_RESUMABLE):
            self._set_outcome(self._stop_outcome if code else RunOutcome.FINISHED)
            return False
        failure = process.failed_log.read_failure()
        if type(failure) is ConfigInvalid:
            problems = [(key, f"{spec.name} cannot be started: {text}") for key, text, _ in failure.problems]
            raise ConfigInvalid(problems=problems) from failure
        if failure is not None and (is_leader or not failure.retryable):
            raise failure
        if self._stop_task is not None and is_leader:
            ending = _describe_end(process, code)
            self._print_line(f"{spec.name} {ending} before saving a checkpoint; the previous one, if any, is used")
            self._set_outcome(self._stop_outcome)
            return False
        return True

    async def _wait_before_restart(self, process: SupervisedProcess, code: int) -> None:
        """Wait for the delay before the next restart. Raises ProcessDied if there is none."""
        spec, budget, ending = process.spec, self._budgets[process.spec.name], _describe_end(process, code)
        num_identical = self._count_identical_crashes(process, code)
        is_bug = num_identical >= MAX_IDENTICAL_CRASHES
        delay = None if is_bug else budget.take_restart()
        if delay is None:
            restarts = f"after {budget.num_restarts} restarts"
            reason = f"the same error {num_identical} times in a row" if is_bug else restarts
            raise ProcessDied(f"{spec.name} {ending}, {reason}; {process.failed_log.describe_tail()}")
        count = f"restart {budget.num_restarts} of {budget.max_restarts}"
        self._print_line(f"{spec.name} {ending}; restarting in {delay:g} s ({count})")
        process.set_state(ProcessState.WAITING)
        await self._notify_changed()
        await asyncio.sleep(delay)
        if spec.role is ProcessRole.LEADER:
            self._leader_restarted.set()
            self._leader_restarted = asyncio.Event()

    def _count_identical_crashes(self, process: SupervisedProcess, code: int) -> int:
        """Return how many crashes in a row, not by a signal or a Ramify failure, had the same last line.

        Each must be within `restart_window` of the one before.
        """
        crashes, tail, now = self._crashes[process.spec.name], process.failed_log.tail(), time.monotonic()
        if is_signal_exit(code) or process.failed_log.read_failure() is not None:
            crashes.clear()
            return 0
        crash = _Crash(tail.splitlines()[-1], now)
        oldest = now - self._settings.restart_window
        if crashes and (crashes[-1].last_line != crash.last_line or crashes[-1].time <= oldest):
            crashes.clear()
        crashes.append(crash)
        return len(crashes)

    # -- the run ---------------------------------------------------------------------------------------------------

    async def _stop_leader(self) -> None:
        leader = next(spec for spec in self.process_specs if spec.role is ProcessRole.LEADER)
        process = self._processes.get(leader.name)
        if process is not None and process.state in ALIVE_STATES:
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(self.grace_period)
        self._print_line("no new checkpoint; the previous one is used")
        self._set_outcome(self._stop_outcome)

    def _set_outcome(self, outcome: RunOutcome | BaseException) -> None:
        """End the run, unless another event has already ended it."""
        if self._outcome.done():
            return
        WATCHDOG.is_ending = outcome is not RunOutcome.FINISHED
        if isinstance(outcome, RunOutcome):
            self._outcome.set_result(outcome)
        else:
            self._outcome.set_exception(outcome)

    def _report_unstopped(self) -> None:
        """Print which processes could not be stopped; the next supervisor of the run waits for their ends."""
        for name, process in self._processes.items():
            if node := process.unstopped_node:
                reason = "which does not answer, until its lease has ended"
                self._print_line(f"{name} may still run on {node}, {reason}")

    async def _notify_ended(self) -> None:
        """Report the last status; if it cannot be recorded, the outcome of the run stays what it is."""
        try:
            await self._notify_changed()
        except RamifyError as error:
            self._print_line(f"the last status of the processes was not recorded: {error.message}")

    async def _notify_changed(self) -> None:
        """Report the status of all processes; return when it is recorded."""
        if self._on_change is None:
            return
        self._num_reports += 1
        report = partial(self._report, self._on_change, self._num_reports, self.get_process_statuses())
        await call_storage(report, "status of the processes")

    def _report(self, on_change: OnChange, number: int, statuses: Sequence[ProcessStatus]) -> None:
        """Call `on_change`, unless a later report was faster."""
        with self._report_lock:
            if number > self._last_report:
                self._last_report = number
                on_change(statuses)

    def _build_status(self, spec: ProcessSpec, process: SupervisedProcess | None, now: float) -> ProcessStatus:
        status = ProcessStatus(
            spec.name, ProcessState.WAITING, 0, self._budgets[spec.name].num_restarts, 0.0, spec.address, str(spec.log)
        )
        if process is not None:
            return msgspec.structs.replace(
                status,
                state=process.state,
                pid=process.pid if process.state in ALIVE_STATES else 0,
                seconds=round(now - process.state_since, 1),
                address=process.address,
                node=process.node,
                token=process.token,
                replacement_delay=process.replacement_delay,
            )
        if (earlier := self._earlier_processes.get(spec.name)) is None:
            return status
        delay = earlier.replacement_delay
        state = ProcessState.WAITING if delay is None else ProcessState.SILENT
        return msgspec.structs.replace(status, state=state, token=str(earlier.token), replacement_delay=delay)

    @contextlib.contextmanager
    def _install_signal_handlers(self) -> Generator[None]:
        """Handle SIGINT, SIGTERM and SIGUSR1, if this is the main thread."""
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
    """Describe how a process ended, as the end of a sentence."""
    if process.lost_node:
        return f"is lost: its node {process.lost_node} could not be reached until its lease ended"
    if process.silent_seconds is None:
        return describe_exit(code)
    return f"did not answer for {process.silent_seconds:.0f} s and was killed"
