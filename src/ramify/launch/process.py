"""One process of a run: what is to be started, and one life of it.

    STARTING -> READY <-> SILENT
        |         |         |
        +---------+---------+--> ENDED   it exited, or was let go

It runs on a leash, in a session of its own (Ctrl-C is for the supervisor alone), and writes to its log, which keeps
what earlier lives have written. Its end is seen at once, through a process handle.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ramify.errors import DeadlineExceeded
from ramify.launch.parent_watch import SIGNAL_EXIT_OFFSET
from ramify.launch.preforked import PreforkClient
from ramify.launch.ready import is_responding
from ramify.store import wrap_storage_errors

TAIL_LINES = 30  # lines of the log that a failure shows
STOP_TIMEOUT = 5.0  # seconds a process gets to end by itself
KILL_TIMEOUT = 3.0  # seconds its leash gets to end the rest
START_TIMEOUT = 10.0  # seconds for a leash to say what it holds
PREFORK_TIMEOUT = 120.0  # seconds for one from the nursery, which may still be loading
POLL_INTERVAL = 0.1  # seconds between two looks at whether it answers


class ProcessRole(Enum):
    """What the end of a process means for the run."""

    LEADER = "leader"  # its exit code is the run's
    FOLLOWER = "follower"  # exit code 0 says that its part is done
    SERVICE = "service"  # should be there as long as the run is


class ProcessState(Enum):
    """Where a process is in its life."""

    WAITING = "waiting"  # for others, or for its next start
    STARTING = "starting"
    READY = "ready"
    SILENT = "silent"  # it has answered before, but no longer does
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process as the plan has it."""

    name: str
    """`inference`, `env/train/reverse`, `orchestrator`, `trainer`."""
    command: tuple[str, ...]
    log: Path
    role: ProcessRole = ProcessRole.SERVICE
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables on top of our own."""
    address: str = ""
    """Where it answers once it is ready (`http://...`, `tcp://...`); without, it is ready when it is there."""
    ready_timeout: float = 600.0
    """Seconds until it has to answer."""
    hang_timeout: float | None = None
    """Seconds without an answer after which it is killed and started again; None leaves a silent process alone."""
    last_state: Callable[[], str] | None = None
    """Returns its last known state, for the log, when it does not answer."""
    prepare: Callable[[], None] | None = None
    """Done before each start."""
    preload_modules: tuple[str, ...] = ()
    """Modules that are its first seconds; it may be forked from a process that has them."""


class SupervisedProcess:
    """One life. Start it once; stop it in any case."""

    def __init__(
        self, spec: ProcessSpec, *, stop_timeout: float = STOP_TIMEOUT, prefork_client: PreforkClient | None = None
    ) -> None:
        self.spec, self.stop_timeout, self.state, self.pid = spec, stop_timeout, ProcessState.STARTING, 0
        self.state_since = time.monotonic()
        self.silent_seconds: float | None = None
        """Seconds without an answer after which it was killed; None if it was not killed for that."""
        self._prefork_client = prefork_client
        self._control_socket: socket.socket | None = None
        """To its leash, which lets it live for as long as this is open."""
        self._watcher_pid = 0
        self._pidfd: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        """The leash, unless it is the nursery's child."""
        self._log_offset = 0

    async def start(self) -> None:
        """Start it. Raises StorageFull or StorageFailed if its log cannot be written."""
        entry = self.spec
        if entry.prepare is not None:
            entry.prepare()
        with wrap_storage_errors(entry.log):
            entry.log.parent.mkdir(parents=True, exist_ok=True)
            log = entry.log.open("ab")
        self._log_offset = log.tell()
        with log:
            if self._prefork_client is not None and await self._start_preforked(self._prefork_client, log.fileno()):
                return
            with self._open_control_socket() as child_socket:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "ramify.launch.parent_watch", str(self.stop_timeout), *entry.command],
                    stdin=child_socket.fileno(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **entry.env},
                    start_new_session=True,
                )
        self._watcher_pid, self._pidfd = self._child.pid, os.pidfd_open(self._child.pid)
        await self._receive_pids(START_TIMEOUT)  # where it ended at once, its exit says more

    async def _start_preforked(self, prefork_client: PreforkClient, log_fd: int) -> bool:
        with self._open_control_socket() as child_socket:
            asked = prefork_client.request_fork(self.spec, self.stop_timeout, child_socket, log_fd)
        return asked and await self._receive_pids(PREFORK_TIMEOUT)

    def _open_control_socket(self) -> socket.socket:
        """The other end of a new line."""
        self._close_control_socket()
        self._control_socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control_socket.setblocking(False)
        return theirs

    def _close_control_socket(self) -> None:
        if self._control_socket is not None:
            self._control_socket.close()
            self._control_socket = None

    async def _receive_pids(self, timeout: float) -> bool:
        """Whether a leash has told what it holds, and given a handle of itself."""
        assert self._control_socket is not None
        try:
            await asyncio.wait_for(_wait_readable(self._control_socket.fileno()), timeout)
            said, handles, _, _ = socket.recv_fds(self._control_socket, 64, 1)
        except (TimeoutError, OSError):
            return False
        if not said or not handles:
            return False
        self._watcher_pid, self.pid = map(int, said.split())
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._pidfd = handles[0]
        return True

    async def wait_until_ready(self) -> None:
        """Return when it answers. Raises DeadlineExceeded if it does not in time."""
        end = time.monotonic() + self.spec.ready_timeout
        while self.spec.address and not await is_responding(self.spec.address):
            if time.monotonic() > end:
                said = f"{self.spec.name} did not answer at {self.spec.address} within {self.spec.ready_timeout:g} s"
                raise DeadlineExceeded(f"{said}; the end of {self.spec.log}:\n{self.tail()}")
            await asyncio.sleep(POLL_INTERVAL)
        self.state = ProcessState.READY

    async def wait_for_exit(self) -> int:
        """Return its exit code when it is over."""
        assert self._pidfd is not None
        await _wait_readable(self._pidfd)
        self.state = ProcessState.ENDED
        if self._child is not None:
            return self._child.wait()
        with contextlib.suppress(OSError):
            told = self._control_socket.recv(64) if self._control_socket is not None else b""
            return int(told or -signal.SIGKILL)  # a leash that was killed tells nothing
        return -signal.SIGKILL

    def send_signal(self, number: signal.Signals) -> None:
        """Tell it something."""
        if self.pid and self.state is not ProcessState.ENDED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def kill(self) -> None:
        """Kill the process, and after KILLING seconds its leash, which may be stopped too; `ended` then returns."""
        self.send_signal(signal.SIGKILL)
        await asyncio.sleep(KILL_TIMEOUT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._watcher_pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Let it go, and return when nothing of it is left."""
        self._close_control_socket()
        if self._pidfd is None:
            return
        try:
            await asyncio.wait_for(self.wait_for_exit(), self.stop_timeout + KILL_TIMEOUT)
        except TimeoutError:  # the leash itself hangs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._watcher_pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):  # what is stuck in the kernel is left to it
                await asyncio.wait_for(self.wait_for_exit(), KILL_TIMEOUT)
        finally:
            self.state = ProcessState.ENDED
            os.close(self._pidfd)
            self._pidfd = self._child = None

    def tail(self) -> str:
        """The end of what this life has written."""
        with contextlib.suppress(OSError), self.spec.log.open("rb") as log:
            log.seek(self._log_offset)
            lines = deque(log, TAIL_LINES)
            return b"".join(lines).decode(errors="replace").strip() or "(nothing)"
        return "(no log)"


async def _wait_readable(fd: int) -> None:
    """Return when there is something to read, or an end."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)


def is_signal_exit(code: int) -> bool:
    """Whether an exit code says that a signal ended the process."""
    return code < 0 or code > SIGNAL_EXIT_OFFSET


def describe_exit(code: int) -> str:
    """What an exit code says, in words."""
    if is_signal_exit(code):
        number = -code if code < 0 else code - SIGNAL_EXIT_OFFSET
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {code}"
