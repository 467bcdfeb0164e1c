"""One process of a run: its spec, and its execution from one start to its exit.

STARTING -> READY <-> SILENT
    |         |         |
    +---------+---------+--> ENDED   it exited or was stopped
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ramify.errors import DeadlineExceeded
from ramify.processes.child import ChildProcess
from ramify.processes.log import ProcessLog
from ramify.processes.prefork import PreforkClient, is_forkable, start_prefork_server
from ramify.store import wrap_storage_errors
from ramify.wire.address import is_listening

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
    """Seconds without an answer after which it is killed and restarted. None: never."""
    last_state: Callable[[], str] | None = None
    """Returns its last known state, for the log, when it does not answer."""
    prepare: Callable[[], None] | None = None
    """Called before each start."""
    preload_modules: tuple[str, ...] = ()
    """Modules that take long to import; the process may be forked from one that has imported them."""


class SupervisedProcess:
    """One execution of a process; its output is appended to its log. Call `start` once, and `stop` in any case.

    Attributes:
        child: the process itself; it takes signals.
        state_since: monotonic time of the last change of `state`.
        silent_seconds: seconds without an answer after which it was killed; None if it was not killed for that.
    """

    def __init__(self, spec: ProcessSpec, *, prefork_client: PreforkClient | None = None) -> None:
        self.spec = spec
        self.set_state(ProcessState.STARTING)
        self.silent_seconds: float | None = None
        self._prefork_client = prefork_client
        self.child = ChildProcess(spec.command, env=spec.env)
        self._log = ProcessLog(spec.log, append=True)

    def set_state(self, state: ProcessState) -> None:
        """Change the state now."""
        self.state, self.state_since = state, time.monotonic()

    async def start(self) -> None:
        """Start the process. Raises StorageFull or StorageFailed if its log cannot be written."""
        spec, client = self.spec, self._prefork_client
        if spec.prepare is not None:
            spec.prepare()
        with wrap_storage_errors(spec.log):
            log = self._log.open()
        with log:
            if client is None or not await self.child.start_preforked(client, spec.preload_modules, log.fileno()):
                await self.child.start(log.fileno())

    async def wait_until_ready(self) -> None:
        """Wait until the process answers or exits. Raises DeadlineExceeded after `ready_timeout` seconds."""
        address, timeout = self.spec.address, self.spec.ready_timeout
        try:
            is_ready = not address or await self.child.wait_until_ready(
                lambda: is_responding(address), timeout=timeout, poll_interval=POLL_INTERVAL
            )
        except TimeoutError:
            message = f"{self.spec.name} did not answer at {address} within {timeout:g} s"
            raise DeadlineExceeded(f"{message}; {self._log.describe_tail()}") from None
        if is_ready and self.state is ProcessState.STARTING:
            self.set_state(ProcessState.READY)

    async def wait_for_exit(self) -> int:
        """Wait until the process has exited, and return its exit code."""
        code = await self.child.wait()
        self.set_state(ProcessState.ENDED)
        return code

    async def stop(self) -> None:
        """Stop the process and all its descendants, and return when they have exited."""
        try:
            await self.child.stop()
        finally:
            if self.state is not ProcessState.ENDED:
                self.set_state(ProcessState.ENDED)

    def tail(self) -> str:
        """Return the last lines that this execution has written to the log."""
        return self._log.tail()


def prefork_shared_modules(specs: Sequence[ProcessSpec]) -> AbstractContextManager[PreforkClient | None]:
    """Start a fork server for the processes that preload modules, if there are two or more with the same environment.

    The context yields a client of the server, or None without one.
    """
    forkable = [spec for spec in specs if is_forkable(spec.command, spec.preload_modules)]
    if len(forkable) < 2 or any(spec.env != forkable[0].env for spec in forkable):
        return contextlib.nullcontext()
    return start_prefork_server(forkable[0].preload_modules, forkable[0].env)


async def is_responding(address: str, *, timeout: float = RESPONSE_TIMEOUT) -> bool:
    """Return whether `http://...` replies with status 200, or `tcp://...` accepts, within `timeout` seconds."""
    if not address.startswith("http"):
        return await is_listening(address, timeout=timeout)
    from ramify.client.http_client import HttpClient, RequestFailed  # loaded only where an HTTP address is probed

    try:
        async with asyncio.timeout(timeout), HttpClient(address, connect_timeout=timeout, max_connections=1) as http:
            return (await http.request("GET", "")).status == 200
    except (RequestFailed, TimeoutError):
        return False
