"""One process of a run: its spec, and its execution from one start to its exit.

STARTING -> READY <-> SILENT
    |         |         |
    +---------+---------+--> ENDED   it exited or was stopped

A process that could not be stopped, because its node cannot be reached, stays SILENT: it may run until its lease ends.

The ranks of a gang are one process in this sense: they start together, and when one of them fails, all are stopped.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from ramify.core.async_calls import call_storage, cancel_all
from ramify.core.errors import DeadlineExceeded, RamifyError
from ramify.launch.gang import build_gang_variables
from ramify.launch.launcher import Launcher, Placement, ProcessSlot, ProcessStart
from ramify.processes.child import wait_until_ready
from ramify.processes.log import ProcessLog
from ramify.processes.prefork import PreforkClient, get_import_env, is_forkable, start_prefork_server
from ramify.processes.wire.address import is_listening
from ramify.run.fencing.lease import RoleLeases, read_lease_clock
from ramify.run.fencing.token import GANG_TOKEN_VARIABLE, FencingToken

POLL_INTERVAL = 0.1  # seconds between readiness probes
RESPONSE_TIMEOUT = 2.0  # seconds for the reply to one probe


class ProcessRole(Enum):
    """What the exit of a process means for the run."""

    LEADER = "leader"  # its exit code is that of the run
    FOLLOWER = "follower"  # exit code 0: its work is done
    SERVICE = "service"  # it should not exit before the run ends


class ProcessState(Enum):
    """The state of a process."""

    WAITING = "waiting"  # for its first start, or its next one
    STARTING = "starting"
    READY = "ready"
    SILENT = "silent"  # it no longer answers
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to start, and how to supervise it."""

    name: str
    """`inference`, `env/train/reverse`, `orchestrator`, `trainer`."""
    command: tuple[str, ...]
    log: Path
    role: ProcessRole = ProcessRole.SERVICE
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables in addition to those of the supervisor."""
    address: str = ""
    """Address at which it answers when it is ready (`http://...`, `tcp://...`); without one, it is ready at once."""
    ready_timeout: float = 600.0
    """Seconds until it must answer."""
    hang_timeout: float | None = None
    """Seconds without an answer after which a process on the head is killed and restarted. None: never."""
    last_state: Callable[[], str] | None = None
    """Returns its last known state, for the log, when it does not answer."""
    prepare: Callable[[], None] | None = None
    """Called before each start, in a thread of its own, as are `build_start` and `last_state`."""
    preload_modules: tuple[str, ...] = ()
    """Modules that take long to import; the process may be forked from one that has imported them."""
    service: str = ""
    """Key under which its address is listed in the address book, if it is not always the same; several may share it."""
    num_ranks: int = 1
    """Number of processes that run this command together, as one gang."""
    placement: Placement | None = None
    """What it needs of the node that it is started on. None: it runs on the head, at the address above."""
    start_after: tuple[str, ...] = ()
    """Names of processes that must have a place, and so an address, before this one is configured and started."""
    build_start: Callable[[ProcessSlot], ProcessStart] | None = None
    """Returns what to start in a slot, for each rank; None: `command`, with `env` and `address`."""

    @property
    def logs(self) -> tuple[Path, ...]:
        """The log of each rank: `trainer.log`, `trainer-1.log`, `trainer-2.log`."""
        names = (f"{self.log.stem}-{rank}{self.log.suffix}" for rank in range(1, self.num_ranks))
        return (self.log, *(self.log.with_name(name) for name in names))


@dataclass(frozen=True, slots=True)
class EarlierProcess:
    """A process of an earlier supervisor of the run, on this head or on another one."""

    token: FencingToken
    may_run: bool
    """Whether that supervisor did not see its end."""
    replacement_delay: float | None = None
    """Seconds after which it is dead for certain, by its lease; None: those of its lease in this configuration."""


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
        """The fencing token of this execution; empty for a process that always runs on the head."""
        return str(self._token) if self.spec.placement is not None else ""

    @property
    def replacement_delay(self) -> float | None:
        """Seconds after which it is dead for certain if its node cannot be reached; None if it runs on the head."""
        return self.spec.placement.lease.replacement_delay if self.spec.placement is not None else None

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
    def failed_log(self) -> Path:
        """The log of the rank that failed; of rank 0 if none did."""
        return self._logs[self._failed_rank].path

    def set_state(self, state: ProcessState) -> None:
        """Change the state now."""
        self.state, self.state_since = state, time.monotonic()

    async def open(self) -> None:
        """Find a place for each rank, and build what to start there.

        Raises DeadlineExceeded if there is no room, and StorageFailed if the files of the process, such as the weights
        that an engine starts with, cannot be read or written.
        """
        spec, name = self.spec, f"files of {self.spec.name}"
        if spec.prepare is not None:
            await call_storage(spec.prepare, name)
        self.slots = await self._launcher.open_slots(self._leases, spec.placement, timeout=spec.ready_timeout)
        self._starts = await call_storage(self._build_starts, name)
        self.address = self._starts[0].address

    def _build_starts(self) -> list[ProcessStart]:
        spec = self.spec
        if spec.build_start is not None:
            return [spec.build_start(slot) for slot in self.slots]
        start = ProcessStart(spec.command, spec.env, address=spec.address, preload_modules=spec.preload_modules)
        return [start] * len(self.slots)

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

    def tail(self) -> str:
        """Return the last lines that this execution has written to the log, of the rank that failed."""
        return self._logs[self._failed_rank].tail()

    def read_failure(self) -> RamifyError | None:
        """Return the failure that the rank that failed reported; None if it ended without one."""
        return self._logs[self._failed_rank].read_failure()


def prefork_shared_modules(specs: Sequence[ProcessSpec]) -> AbstractContextManager[PreforkClient | None]:
    """Start a fork server for the processes that preload modules, if there are two or more.

    Their environments may differ only in variables of Ramify, such as the reserved ports. The context yields a client
    of the server, or None without one.
    """
    forkable = [spec for spec in specs if is_forkable(spec.command, spec.preload_modules)]
    import_envs = [get_import_env(spec.env) for spec in forkable]
    if len(forkable) < 2 or any(env != import_envs[0] for env in import_envs):
        return contextlib.nullcontext()
    return start_prefork_server(forkable[0].preload_modules, import_envs[0])


async def is_responding(address: str, *, timeout: float = RESPONSE_TIMEOUT) -> bool:
    """Return whether `http://...` replies with status 200, or `tcp://...` accepts, within `timeout` seconds."""
    if not address.startswith("http"):
        return await is_listening(address, timeout=timeout)
    from ramify.infer.client.http_client import HttpClient, RequestFailed  # loaded only where an HTTP address is probed

    try:
        async with asyncio.timeout(timeout), HttpClient(address, connect_timeout=timeout, max_connections=1) as http:
            return (await http.request("GET", "")).status == 200
    except (RequestFailed, TimeoutError):
        return False
