"""One process of a run: its execution from one start to its exit, whether it answers, and its budget of restarts.

STARTING -> READY <-> SILENT
    |         |         |
    +---------+---------+--> ENDED   it exited or was stopped

A process that could not be stopped, because its node cannot be reached, stays SILENT: it may run until its lease ends.
The ranks of a gang are one process in this sense: they start together, and when one of them fails, all are stopped.
"""

import asyncio
import signal
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from ramify.core.async_calls import call_storage, cancel_all
from ramify.core.errors import DeadlineExceeded
from ramify.launch.launcher import Launcher, ProcessRole, ProcessSlot, ProcessSpec, ProcessStart
from ramify.processes.child import wait_until_ready
from ramify.processes.log import ProcessLog
from ramify.processes.wire.address import is_listening
from ramify.run.fencing.lease import RoleLeases, read_lease_clock
from ramify.run.fencing.token import GANG_TOKEN_VARIABLE, FencingToken
from ramify.run.state import ProcessState

RESTART_WINDOW = 3600.0  # seconds for which a restart counts
FIRST_DELAY = 0.5  # seconds before the first restart
MAX_DELAY = 30.0  # seconds


class RestartBudget:
    """The restarts of one process per hour; the delay doubles with each. `num_restarts` counts all of them.

    A process that dies right after every start is a bug, which endless restarts would hide.
    """

    def __init__(
        self, max_restarts: int, *, first_delay: float = FIRST_DELAY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_restarts, self._first_delay, self._clock = max_restarts, first_delay, clock
        self._recent_restarts: deque[float] = deque()
        self.num_restarts = 0

    def take_restart(self) -> float | None:
        """Take a restart from the budget and return the delay before it; None if the budget is used up."""
        now = self._clock()
        while self._recent_restarts and self._recent_restarts[0] <= now - RESTART_WINDOW:
            self._recent_restarts.popleft()
        if len(self._recent_restarts) >= self.max_restarts:
            return None
        delay = min(self._first_delay * 2 ** len(self._recent_restarts), MAX_DELAY)
        self._recent_restarts.append(now)
        self.num_restarts += 1
        return delay


POLL_INTERVAL = 0.1  # seconds between readiness probes
RESPONSE_TIMEOUT = 2.0  # seconds for the reply to one probe


@dataclass(frozen=True, slots=True)
class EarlierProcess:
    """A process of an earlier supervisor of the run, on this head or on another one."""

    token: FencingToken
    replacement_delay: float | None = None
    """Seconds after which it is dead for certain, by its lease; None: it has ended, or ended with that supervisor."""


class SupervisedProcess:
    """One execution of a process; its output is appended to its log. Call `open` and `start` once, `stop` in any case.

    Attributes:
        slots: the places of its ranks; empty before `open`.
        address: the address at which this execution answers.
        state_since: monotonic time of the last change of `state`.
        silent_seconds: seconds without an answer after which it was killed; None if it was not killed for that.
    """

    def __init__(self, spec: ProcessSpec, launcher: Launcher, leases: RoleLeases) -> None:
        self.spec, self._launcher, self._leases, self._token = spec, launcher, leases, leases.token
        self.set_state(ProcessState.STARTING)
        self.slots: Sequence[ProcessSlot] = ()
        self.address = spec.address
        self.silent_seconds: float | None = None
        self._starts: list[ProcessStart] = []
        self._logs = [ProcessLog(path, append=True) for path in spec.logs]
        self._failed_rank = 0
        self._pending_signal: signal.Signals | None = None  # to be sent when there is a slot

    @property
    def pid(self) -> int:
        """Process id of rank 0, on its node; 0 until it is known."""
        return self.slots[0].pid if self.slots else 0

    @property
    def node(self) -> str:
        """Names of the nodes it runs on; empty for the head's own processes."""
        return ", ".join(dict.fromkeys(slot.node for slot in self.slots if slot.node))

    @property
    def token(self) -> str:
        """The fencing token of this execution; empty for a process without a placement."""
        return str(self._token) if self.spec.placement is not None else ""

    @property
    def replacement_delay(self) -> float | None:
        """Seconds after which it is dead for certain without its node; None if it ends with this process."""
        if self.spec.placement is None or not self._launcher.can_lose_nodes:
            return None
        return self.spec.placement.lease.replacement_delay

    @property
    def unstopped_node(self) -> str:
        """The first of its nodes on which a rank may still run; an empty string if there is none."""
        return next((slot.node for slot in self.slots if not slot.has_exited), "")

    @property
    def unreachable_node(self) -> str:
        """The first of its nodes that cannot be reached now; an empty string if there is none."""
        return next((slot.node for slot in self.slots if slot.unreachable_seconds), "")

    @property
    def lost_node(self) -> str:
        """The node of the rank that failed, if it was lost, else an empty string."""
        slot = self.slots[self._failed_rank] if self.slots else None
        return slot.node if slot is not None and slot.is_lost else ""

    @property
    def failed_log(self) -> ProcessLog:
        """The log of the rank that failed; of rank 0 if none did."""
        return self._logs[self._failed_rank]

    def set_state(self, state: ProcessState) -> None:
        """Change the state now."""
        self.state, self.state_since = state, time.monotonic()

    async def open(self) -> None:
        """Find a place for each rank, and build what to start there.

        Raises DeadlineExceeded if there is no room, and StorageFailed if the files of the process, such as the weights
        that an engine starts with, cannot be read or written.
        """
        spec = self.spec
        self.slots = await self._launcher.open_slots(self._leases, spec.placement, timeout=spec.ready_timeout)
        self._starts = await call_storage(self._build_starts, f"files of {spec.name}")
        self.address = self._starts[0].address

    def _build_starts(self) -> list[ProcessStart]:
        spec = self.spec
        starts = [spec.build_start(slot) for slot in self.slots]
        modules = spec.preload_modules
        return [replace(start, env={**spec.env, **start.env}, preload_modules=modules) for start in starts]

    async def start(self) -> None:
        """Start all ranks. Raises StorageFull or StorageFailed if a log cannot be written."""
        variables = build_gang_variables(self.slots, self._token)
        if self.spec.role is ProcessRole.FOLLOWER and self.spec.placement is not None:
            variables[0][GANG_TOKEN_VARIABLE] = str(self._token)  # also for the only rank: it registers with its token
        starts = [replace(start, env={**start.env, **more}) for start, more in zip(self._starts, variables)]
        if self._pending_signal is not None:
            self.send_signal(self._pending_signal)
        self._leases.begin(read_lease_clock())
        await asyncio.gather(*(slot.start(start, log) for slot, start, log in zip(self.slots, starts, self._logs)))

    async def wait_until_ready(self) -> None:
        """Wait until the process answers or exits. Raises DeadlineExceeded after `ready_timeout` seconds."""
        address, timeout = self.address, self.spec.ready_timeout
        try:
            is_ready = not address or await wait_until_ready(
                self.slots[0].poll, lambda: is_responding(address), timeout=timeout, poll_interval=POLL_INTERVAL
            )
        except TimeoutError:
            message = f"{self.spec.name} did not answer at {address} within {timeout:g} s"
            raise DeadlineExceeded(f"{message}; {self._logs[0].describe_tail()}") from None
        if is_ready and self.state is ProcessState.STARTING:
            self.set_state(ProcessState.READY)

    async def wait_for_exit(self) -> int:
        """Wait until all ranks have exited, and return the exit code of the first that failed or was lost, else 0.

        When a rank fails, the others are stopped.
        """
        ranks = {asyncio.create_task(slot.wait()): rank for rank, slot in enumerate(self.slots)}
        exit_code, running = 0, set(ranks)
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.result() and not exit_code:
                        exit_code, self._failed_rank = task.result(), ranks[task]
                if exit_code:
                    self._stop_other_ranks()
        finally:
            await cancel_all(list(ranks))
        for rank, slot in enumerate(self.slots):
            if slot.is_lost:  # the others failed because of it
                exit_code, self._failed_rank = slot.poll() or exit_code, rank
        self._record_exits()
        self.set_state(ProcessState.ENDED)
        return exit_code

    def _stop_other_ranks(self) -> None:
        """Stop the ranks that still run; the leases of those that cannot be reached are no longer renewed."""
        self._record_exits()
        for slot in self.slots:
            if slot.poll() is None:
                slot.request_stop()

    def _record_exits(self) -> None:
        for rank, slot in enumerate(self.slots):
            if slot.has_exited:
                self._leases.record_exit(self._token, rank)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank; before `open` has returned, when it has."""
        self._pending_signal = None if self.slots else number
        for slot in self.slots:
            slot.send_signal(number)

    async def kill(self) -> None:
        """Kill all ranks with their descendants."""
        await asyncio.gather(*(slot.kill() for slot in self.slots))

    async def stop(self) -> None:
        """Stop all ranks with their descendants, and return when they have exited or cannot be reached.

        Raises the first error, after all ranks were asked to stop.
        """
        try:
            results = await asyncio.gather(*(slot.stop() for slot in self.slots), return_exceptions=True)
        finally:
            state = ProcessState.SILENT if self.unstopped_node else ProcessState.ENDED
            if self.state is not state:
                self.set_state(state)
        for result in results:
            if isinstance(result, BaseException):
                raise result


def build_gang_variables(slots: Sequence[ProcessSlot], token: FencingToken) -> list[dict[str, str]]:
    """Return the variables of each rank; none for a process with one rank.

    Rank 0 listens at MASTER_ADDR and MASTER_PORT. LOCAL_RANK counts the ranks of one node. The token tells the starts
    of a gang apart, so that a rank of an earlier start cannot join.
    """
    if len(slots) == 1:
        return [{}]
    variables, num_local_ranks = list[dict[str, str]](), Counter[str]()
    for rank, slot in enumerate(slots):
        variables.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(slots)),
                "LOCAL_RANK": str(num_local_ranks[slot.host]),
                "MASTER_ADDR": slots[0].host,
                "MASTER_PORT": str(slots[0].port),
                GANG_TOKEN_VARIABLE: str(token),
            }
        )
        num_local_ranks[slot.host] += 1
    return variables


async def is_responding(address: str, *, timeout: float = RESPONSE_TIMEOUT, any_status: bool = False) -> bool:
    """Return whether `http://...` replies with status 200, or `tcp://...` accepts, within `timeout` seconds.

    With `any_status`, an HTTP server may also reply that it is not ready.
    """
    if not address.startswith("http"):
        return await is_listening(address, timeout=timeout)
    from ramify.infer.client.http_client import HttpClient, RequestFailed  # loaded only where an HTTP address is probed

    try:
        async with asyncio.timeout(timeout), HttpClient(address, connect_timeout=timeout, max_connections=1) as http:
            return (await http.request("GET", "")).status == 200 or any_status
    except (RequestFailed, TimeoutError):
        return False


# Unanswered requests after which a process counts as silent. More than one, because a supervisor that was stopped
# itself finds an old request unanswered when it is continued.
MAX_UNANSWERED = 3


async def wait_for_silence(
    process: SupervisedProcess, on_change: Callable[[], Awaitable[None]], *, max_interval: float
) -> float:
    """Wait until a process has not answered for its `hang_timeout`, and return the seconds since its last answer.

    It may be stopped (SIGSTOP, a debugger) or its event loop may hang. `on_change` is called whenever it becomes silent
    or answers again. `max_interval` limits the seconds between two requests, and the timeout of each.
    """
    address, hang_timeout = process.address, process.spec.hang_timeout
    assert hang_timeout is not None
    # A process is shown as silent after half of the timeout.
    interval = min(hang_timeout / (4 * MAX_UNANSWERED), max_interval)
    num_unanswered, silent_since = 0, time.monotonic()
    while True:
        await asyncio.sleep(interval)
        requested_at = time.monotonic()
        if await is_responding(address, timeout=interval, any_status=True):
            num_unanswered = 0
        else:
            num_unanswered += 1
            silent_since = requested_at if num_unanswered == 1 else silent_since
        is_silent = num_unanswered >= MAX_UNANSWERED
        state = ProcessState.SILENT if is_silent else ProcessState.READY
        if process.state is not state and process.state is not ProcessState.ENDED:
            process.set_state(state)
            await on_change()
        silent_seconds = time.monotonic() - silent_since
        if is_silent and silent_seconds >= hang_timeout:
            return silent_seconds


async def watch_reachability(
    process: SupervisedProcess, on_change: Callable[[], Awaitable[None]], *, interval: float
) -> None:
    """Set the state of a process to SILENT while a node of it cannot be reached. Runs until it is cancelled.

    `on_change` is called whenever the state changes. The process is not killed: its node does that when the lease ends.
    """
    while True:
        await asyncio.sleep(interval)
        state = ProcessState.SILENT if process.unreachable_node else ProcessState.READY
        if process.state is not state and process.state is not ProcessState.ENDED:
            process.set_state(state)
            await on_change()
