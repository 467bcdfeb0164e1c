"""One child process, from its start to its exit.

The process runs under a watcher (see `watcher`), in its own session, so that Ctrl-C reaches only its parent. The parent
holds the control socket: when it is closed, the watcher stops the process. The parent notices the exit at once, through
a pidfd.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ramify.core.errors import DeadlineExceeded, ProcessDied
from ramify.processes.exit import EXIT_NOT_STARTED
from ramify.processes.log import FAILURE_VARIABLE
from ramify.processes.prefork import PreforkClient
from ramify.processes.watcher import DETACH_FLAG

RAMIFY_COMMAND = (sys.executable, "-m", "ramify")  # the `ramify` command of this environment
WATCHER_COMMAND = (sys.executable, "-m", "ramify.processes.watcher")
CHILD_VARIABLES = {FAILURE_VARIABLE: "1"}  # of every child process
STOP_TIMEOUT = 5.0  # seconds between SIGTERM and SIGKILL
KILL_TIMEOUT = 3.0  # seconds for the watcher to kill the descendants
START_TIMEOUT = 60.0  # seconds for the watcher to send the pids
PREFORK_TIMEOUT = 120.0  # the same, for the fork server, which may still be importing modules


class ChildProcess:
    """One execution of a command. Call `spawn` once, and `stop` in any case.

    A signal or the end of a lease that comes before the start applies to the command that is started.

    Attributes:
        pid: process id of the command; 0 until it is known.
        exit_code: exit code of the command; None until `poll`, `wait` or `stop` has seen it.
    """

    def __init__(
        self,
        *,
        stop_timeout: float = STOP_TIMEOUT,
        is_detached: bool = False,
        start_timeout: float = START_TIMEOUT,
        watcher_command: Sequence[str] = WATCHER_COMMAND,
    ) -> None:
        """Prepare an execution.

        A detached watcher is not a child of this process: a framework that kills the children of this process then
        leaves the watcher time to clean up. `watcher_command` starts the watcher, and `start_timeout` is the number of
        seconds until the watcher must have reported that the command runs.
        """
        self.stop_timeout, self._is_detached, self._start_timeout = stop_timeout, is_detached, start_timeout
        self._watcher_command = tuple(watcher_command)
        self.pid = 0
        self.exit_code: int | None = None
        self._control_socket: socket.socket | None = None  # the watcher stops the process when this is closed
        self._watcher_pid = 0
        self._watcher_pidfd: int | None = None
        self._watcher_popen: subprocess.Popen[bytes] | None = None  # None if it is not a child of this process
        self._is_starting = False  # a watcher was requested and has neither sent its pids nor exited
        self._pending_signal: signal.Signals | None = None  # to be sent when the pid is known
        self._lease_end: float | None = None

    def set_lease_end(self, lease_end: float) -> None:
        """Let the watcher kill the process and its descendants at this time of CLOCK_BOOTTIME.

        A later call moves the time. Before `spawn` it is kept for the process that is started.
        """
        self._lease_end = lease_end
        if self._control_socket is not None:
            with contextlib.suppress(OSError):  # the watcher has exited
                self._control_socket.send(str(lease_end).encode())

    async def spawn(
        self,
        command: Sequence[str],
        output_fd: int,
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        command_forks_watcher: bool = False,
    ) -> None:
        """Start a command with its output to `output_fd`, and with `env` added to the environment of this process.

        Raises ProcessDied or DeadlineExceeded if this fails.

        After a failure, the process may still start, late: only `has_exited` says that none runs. `request_stop`
        prevents the late start.

        The process inherits `pass_fds`, whose numbers are appended to its arguments. With `command_forks_watcher`, the
        command itself calls `fork_under_watcher`, which saves the start of an interpreter. It then chooses the time
        between SIGTERM and SIGKILL; `stop_timeout` is only how long `stop` waits.
        """
        detach = (DETACH_FLAG,) if self._is_detached else ()
        watcher = () if command_forks_watcher else (*self._watcher_command, *detach, str(self.stop_timeout))
        try:
            with self._open_control_socket() as child_socket:
                popen = subprocess.Popen(
                    [*watcher, *command, *map(str, pass_fds)],
                    stdin=child_socket.fileno(),
                    stdout=output_fd,
                    stderr=output_fd,
                    env={**os.environ, **CHILD_VARIABLES, **(env or {})},
                    pass_fds=pass_fds,
                    start_new_session=True,
                )
                self._is_starting = True
            if self._is_detached:
                await _wait_for_fork(popen, self._start_timeout)
                if not await self._receive_pids(self._start_timeout):
                    raise ProcessDied(f"{command[0]} cannot be started: its watcher has exited")
                return
            self._watcher_popen, self._watcher_pid = popen, popen.pid
            self._watcher_pidfd = os.pidfd_open(self._watcher_pid)
            await self._receive_pids(self._start_timeout)  # if the watcher exits first, `wait` returns its exit code
        except (TimeoutError, subprocess.TimeoutExpired):
            raise DeadlineExceeded(f"{command[0]} did not start within {self._start_timeout:g} s") from None
        except OSError as error:
            raise ProcessDied(f"{command[0]} cannot be started: {error.strerror}") from error

    async def spawn_preforked(
        self,
        client: PreforkClient,
        modules: Sequence[str],
        command: Sequence[str],
        output_fd: int,
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        command_forks_watcher: bool = False,
    ) -> bool:
        """Fork the process from a fork server that has imported `modules`; return False if it cannot be forked.

        The options are the same as for `spawn`.
        """
        stop_timeout, env = None if command_forks_watcher else self.stop_timeout, {**CHILD_VARIABLES, **(env or {})}
        with contextlib.suppress(OSError):  # a TimeoutError is one, too
            with self._open_control_socket() as child_socket:
                fds = (child_socket.fileno(), output_fd, *pass_fds)
                is_requested = client.request_fork(command, modules, env, stop_timeout=stop_timeout, fds=fds)
                self._is_starting = is_requested
            return is_requested and await self._receive_pids(PREFORK_TIMEOUT)
        return False

    @property
    def has_exited(self) -> bool:
        """Whether no process runs: none was started, or it has exited with its descendants."""
        return self.poll() is not None or (self._watcher_pidfd is None and not self._is_starting)

    def poll(self) -> int | None:
        """Return the exit code if the process and its descendants have exited, else None."""
        if self._is_starting and self._control_socket is not None and is_readable(self._control_socket.fileno()):
            is_gone = not self._read_pids() and self._watcher_pidfd is None
            self.exit_code = EXIT_NOT_STARTED if is_gone else self.exit_code
        if self.exit_code is None and self._watcher_pidfd is not None and is_readable(self._watcher_pidfd):
            popen = self._watcher_popen
            self.exit_code = popen.wait() if popen is not None else self._receive_exit_code()
        return self.exit_code

    async def wait(self) -> int:
        """Wait until the process and its descendants have exited, and return the exit code."""
        while (exit_code := self.poll()) is None:
            # A start that was cancelled or timed out leaves the pids to be read: a signal may wait for them.
            fd = self._control_socket.fileno() if self._is_starting and self._control_socket else self._watcher_pidfd
            assert fd is not None, "the process was not started"
            await wait_readable(fd)
        return exit_code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the command if it is running, and to one that is being started when its pid is known."""
        if not self.pid:
            self._pending_signal = number
        elif self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def kill(self) -> None:
        """Kill the process, and after KILL_TIMEOUT seconds its watcher, which may be stopped too."""
        self.send_signal(signal.SIGKILL)
        await asyncio.sleep(KILL_TIMEOUT)
        self._kill_watcher()

    def request_stop(self) -> None:
        """Let the watcher stop the process: by SIGTERM, and after `stop_timeout` seconds by SIGKILL."""
        if self._control_socket is not None:
            with contextlib.suppress(OSError):  # the watcher has exited
                self._control_socket.shutdown(socket.SHUT_WR)

    async def stop(self) -> int | None:
        """Stop the process and all its descendants, and return the exit code; None if it was never started.

        If this is cancelled, the process is killed. One that is stuck in the kernel counts as killed.
        """
        try:
            if self._watcher_pidfd is not None or self._is_starting:
                self.request_stop()
                async with asyncio.timeout(self.stop_timeout + KILL_TIMEOUT):
                    await self.wait()
        except TimeoutError:  # the watcher itself hangs
            self._kill_watcher()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT):
                    await self.wait()
        finally:
            self._close()
        return self.exit_code

    def _close(self) -> None:
        if self._watcher_pidfd is not None:
            if self.pid:
                self.send_signal(signal.SIGKILL)
            else:
                self._kill_watcher()
            self.exit_code = -signal.SIGKILL if self.exit_code is None else self.exit_code
            os.close(self._watcher_pidfd)
            self._watcher_pidfd = None
        if self._control_socket is not None:
            self._control_socket.close()
            self._control_socket = None
        self._is_starting = False  # a watcher that finds its control socket closed starts nothing

    def _kill_watcher(self) -> None:
        if self._watcher_pid and self.poll() is None:  # group 0 would be this process's own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._watcher_pid, signal.SIGKILL)

    def _open_control_socket(self) -> socket.socket:
        """Open a new control socket, and return its other end."""
        self._close()
        self.exit_code = None  # a start that timed out may have set it
        self._control_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control_socket.setblocking(False)
        if self._lease_end is not None:
            self.set_lease_end(self._lease_end)
        return child_socket

    async def _receive_pids(self, timeout: float) -> bool:
        """Receive the pids and a pidfd from the watcher. Return False if it exits first; raise TimeoutError."""
        assert self._control_socket is not None
        async with asyncio.timeout(timeout):
            await wait_readable(self._control_socket.fileno())
        return self._read_pids() if self._is_starting else bool(self.pid)  # `poll` may have read them

    def _read_pids(self) -> bool:
        """Read the message with the pids; return False if the watcher has exited without sending it."""
        assert self._control_socket is not None
        self._is_starting = False
        try:
            try:
                message, fds, _, _ = socket.recv_fds(self._control_socket, 64, 1)
            except ConnectionResetError:  # the watcher exited before it read a message; what it sent can still be read
                message, fds, _, _ = socket.recv_fds(self._control_socket, 64, 1)
        except ConnectionError:
            return False
        if not message or not fds:
            return False
        self._watcher_pid, self.pid = map(int, message.split())
        if self._watcher_pidfd is not None:
            os.close(self._watcher_pidfd)
        self._watcher_pidfd = fds[0]
        if self._pending_signal is not None:
            self.send_signal(self._pending_signal)
        return True

    def _receive_exit_code(self) -> int:
        with contextlib.suppress(OSError):
            message = self._control_socket.recv(64) if self._control_socket is not None else b""
            return int(message or -signal.SIGKILL)  # a killed watcher sends nothing
        return -signal.SIGKILL


async def wait_until_ready(
    poll: Callable[[], int | None], is_ready: Callable[[], Awaitable[bool]], *, timeout: float, poll_interval: float
) -> bool:
    """Wait until `is_ready()`; return False if `poll` returns an exit code first. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    while True:
        exit_code = poll()  # before `is_ready`, which may read the last output
        if await is_ready():
            return True
        if exit_code is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"not ready within {timeout:g} s")
        await asyncio.sleep(poll_interval)


async def _wait_for_fork(popen: subprocess.Popen[bytes], timeout: float) -> None:
    """Wait until a process has exited that leaves a detached watcher behind. Raises TimeoutError, and kills it then."""
    pidfd = os.pidfd_open(popen.pid)
    try:
        async with asyncio.timeout(timeout):
            await wait_readable(pidfd)
    finally:
        os.close(pidfd)
        if popen.poll() is None:
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()


def is_readable(fd: int) -> bool:
    """Return whether a file descriptor is readable or at its end."""
    poller = select.poll()  # `select` takes no descriptors above 1023
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


async def wait_readable(fd: int) -> None:
    """Wait until a file descriptor is readable or at its end. Several tasks may wait for the same one."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    own_fd = os.dup(fd)  # an event loop has one reader per descriptor
    loop.add_reader(own_fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(own_fd)
        os.close(own_fd)
