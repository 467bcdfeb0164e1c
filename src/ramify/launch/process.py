"""One process of a run: its spec, and its execution from one start to its exit.

    STARTING -> READY <-> SILENT
        |         |         |
        +---------+---------+--> ENDED   it exited or was stopped

A process runs under a watcher (see `parent_watch`), in its own session, so that Ctrl-C reaches only the supervisor. Its
output is appended to its log. Its exit is noticed at once, through a pidfd.
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
from ramify.store import wrap_storage_errors
from ramify.wire.address import is_listening

TAIL_LINES = 30  # lines of the log that a failure shows
STOP_TIMEOUT = 5.0  # seconds between SIGTERM and SIGKILL
KILL_TIMEOUT = 3.0  # seconds for the watcher to kill the descendants
START_TIMEOUT = 10.0  # seconds for the watcher to send the pids
PREFORK_TIMEOUT = 120.0  # the same, for the fork server, which may still be importing modules
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
    """One execution of a process. Call `start` once, and `stop` in any case.

    Attributes:
        pid: process id of the command; 0 until it is known.
        state_since: monotonic time of the last change of `state`.
        silent_seconds: seconds without an answer after which it was killed; None if it was not killed for that.
    """

    def __init__(
        self, spec: ProcessSpec, *, stop_timeout: float = STOP_TIMEOUT, prefork_client: PreforkClient | None = None
    ) -> None:
        self.spec, self.stop_timeout, self.state, self.pid = spec, stop_timeout, ProcessState.STARTING, 0
        self.state_since = time.monotonic()
        self.silent_seconds: float | None = None
        self._prefork_client = prefork_client
        self._control_socket: socket.socket | None = None  # the watcher stops the process when this is closed
        self._watcher_pid = 0
        self._pidfd: int | None = None  # of the watcher
        self._watcher: subprocess.Popen[bytes] | None = None  # None if it is a child of the fork server
        self._log_offset = 0

    async def start(self) -> None:
        """Start the process. Raises StorageFull or StorageFailed if its log cannot be written."""
        spec = self.spec
        if spec.prepare is not None:
            spec.prepare()
        with wrap_storage_errors(spec.log):
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            log = spec.log.open("ab")
        self._log_offset = log.tell()
        with log:
            if self._prefork_client is not None and await self._start_preforked(self._prefork_client, log.fileno()):
                return
            with self._open_control_socket() as child_socket:
                self._watcher = subprocess.Popen(
                    [sys.executable, "-m", "ramify.launch.parent_watch", str(self.stop_timeout), *spec.command],
                    stdin=child_socket.fileno(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **spec.env},
                    start_new_session=True,
                )
        self._watcher_pid, self._pidfd = self._watcher.pid, os.pidfd_open(self._watcher.pid)
        await self._receive_pids(START_TIMEOUT)  # a failure is noticed by the exit of the process

    async def _start_preforked(self, prefork_client: PreforkClient, log_fd: int) -> bool:
        with self._open_control_socket() as child_socket:
            is_requested = prefork_client.request_fork(self.spec, self.stop_timeout, child_socket, log_fd)
        return is_requested and await self._receive_pids(PREFORK_TIMEOUT)

    def _open_control_socket(self) -> socket.socket:
        """Open a new control socket, and return its other end."""
        self._close_control_socket()
        self._control_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control_socket.setblocking(False)
        return child_socket

    def _close_control_socket(self) -> None:
        if self._control_socket is not None:
            self._control_socket.close()
            self._control_socket = None

    async def _receive_pids(self, timeout: float) -> bool:
        """Receive the pids and a pidfd from the watcher. Return False if it does not send them in time."""
        assert self._control_socket is not None
        try:
            await asyncio.wait_for(_wait_readable(self._control_socket.fileno()), timeout)
            message, fds, _, _ = socket.recv_fds(self._control_socket, 64, 1)
        except (TimeoutError, OSError):
            return False
        if not message or not fds:
            return False
        self._watcher_pid, self.pid = map(int, message.split())
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._pidfd = fds[0]
        return True

    async def wait_until_ready(self) -> None:
        """Wait until the process answers. Raises DeadlineExceeded after `ready_timeout` seconds."""
        spec, deadline = self.spec, time.monotonic() + self.spec.ready_timeout
        while spec.address and not await is_responding(spec.address):
            if time.monotonic() > deadline:
                message = f"{spec.name} did not answer at {spec.address} within {spec.ready_timeout:g} s"
                raise DeadlineExceeded(f"{message}; last lines of {spec.log}:\n{self.tail()}")
            await asyncio.sleep(POLL_INTERVAL)
        self.state = ProcessState.READY

    async def wait_for_exit(self) -> int:
        """Wait until the process has exited, and return its exit code."""
        assert self._pidfd is not None
        await _wait_readable(self._pidfd)
        self.state = ProcessState.ENDED
        if self._watcher is not None:
            return self._watcher.wait()
        with contextlib.suppress(OSError):
            message = self._control_socket.recv(64) if self._control_socket is not None else b""
            return int(message or -signal.SIGKILL)  # a killed watcher sends nothing
        return -signal.SIGKILL

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the command, if it is running."""
        if self.pid and self.state is not ProcessState.ENDED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def kill(self) -> None:
        """Kill the process, and after KILL_TIMEOUT seconds its watcher, which may be stopped too."""
        self.send_signal(signal.SIGKILL)
        await asyncio.sleep(KILL_TIMEOUT)
        self._kill_watcher()

    async def stop(self) -> None:
        """Stop the process and all its descendants, and return when they have exited."""
        self._close_control_socket()
        if self._pidfd is None:
            return
        try:
            await asyncio.wait_for(self.wait_for_exit(), self.stop_timeout + KILL_TIMEOUT)
        except TimeoutError:  # the watcher itself hangs
            self._kill_watcher()
            with contextlib.suppress(TimeoutError):  # it is stuck in the kernel
                await asyncio.wait_for(self.wait_for_exit(), KILL_TIMEOUT)
        finally:
            self.state = ProcessState.ENDED
            os.close(self._pidfd)
            self._pidfd = self._watcher = None

    def _kill_watcher(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._watcher_pid, signal.SIGKILL)

    def tail(self) -> str:
        """Return the last lines that this execution has written to the log."""
        with contextlib.suppress(OSError), self.spec.log.open("rb") as log:
            log.seek(self._log_offset)
            lines = deque(log, TAIL_LINES)
            return b"".join(lines).decode(errors="replace").strip() or "(nothing)"
        return "(no log)"


async def _wait_readable(fd: int) -> None:
    """Wait until a file descriptor is readable or at its end."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)


async def is_responding(address: str, *, timeout: float = RESPONSE_TIMEOUT) -> bool:
    """Return whether `http://...` replies with status 200 within `timeout` seconds, or `tcp://...` is listening."""
    if not address.startswith("http"):
        return await is_listening(address)
    from ramify.client.http_client import HttpClient, RequestFailed  # loaded only where an HTTP address is probed

    try:
        async with asyncio.timeout(timeout), HttpClient(address, connect_timeout=timeout, max_connections=1) as http:
            return (await http.request("GET", "")).status == 200
    except (RequestFailed, TimeoutError):
        return False


def is_signal_exit(code: int) -> bool:
    """Return whether an exit code means that a signal killed the process."""
    return code < 0 or code > SIGNAL_EXIT_OFFSET


def describe_exit(code: int) -> str:
    """Describe an exit code, as the end of a sentence."""
    if is_signal_exit(code):
        number = -code if code < 0 else code - SIGNAL_EXIT_OFFSET
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(number).name}"
    return f"ended with exit code {code}"
