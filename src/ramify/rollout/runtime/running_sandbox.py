"""A running sandbox: its first program, what that handed out, its control group, and how it ends."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
from abc import ABC, abstractmethod
from functools import cache

from ramify.core.errors import AgentFailed, RamifyError, SandboxError
from ramify.env.runtime import ResourceLimits
from ramify.processes.exit import SIGNAL_EXIT_OFFSET
from ramify.rollout.runtime.bwrap import build_bwrap_command, build_seccomp_filter
from ramify.rollout.runtime.cgroup import Cgroup, find_cgroup_parents, find_leftover_groups
from ramify.rollout.runtime.config import SandboxRuntimeConfig
from ramify.rollout.runtime.owner import remove_leftovers
from ramify.rollout.runtime.sandbox_process import SandboxChannel, create_sealed_file, receive

BOOT_TIMEOUT = 20.0  # seconds for a sandbox to report that it is ready
KILLED_EXIT_CODE = SIGNAL_EXIT_OFFSET + signal.SIGKILL  # of bwrap, for its first process
MAX_REASON_BYTES = 2000  # of standard error, in an error message
STOP_TIMEOUT = 10.0  # seconds for the kernel to end a sandbox, or a template with all its sandboxes
SWEEP_TIMEOUT = 0.2  # seconds for a leftover control group to become empty


class RunningSandbox(ABC):
    """A sandbox with its first program, and what that handed out. A subclass starts it.

    - `disk_mb`: the size of its files.
    - `is_forked`: whether its first program can fork for a program whose packages it has imported.
    """

    is_forked = False

    def __init__(self, disk_mb: int | None) -> None:
        self.disk_mb = disk_mb
        self._first_process_fd = self._directory_fd = -1
        self._listener: socket.socket | None = None
        self._cgroup: Cgroup | None = None
        self._is_ready = self._is_killed = False
        self.channel: SandboxChannel

    @property
    def is_running(self) -> bool:
        """Whether the sandbox was ready and has not ended."""
        return self._is_ready and not self.channel.is_closed

    async def start(self, config: SandboxRuntimeConfig) -> None:
        """Start the sandbox and wait until it is ready. Raises SandboxError if it does not start; `stop` it then."""
        if find_cgroup_parents().directories:
            await asyncio.to_thread(_sweep_groups_once)
            self._cgroup = await asyncio.to_thread(Cgroup)
            self._cgroup.set_limits(config.limits)
        try:
            async with asyncio.timeout(BOOT_TIMEOUT):
                await self._boot(config)
        except TimeoutError as error:
            raise SandboxError(f"a sandbox was not ready after {BOOT_TIMEOUT:g} s") from error
        except OSError as error:
            raise SandboxError(f"a sandbox cannot be started: {error}") from error
        self._is_ready = True

    @abstractmethod
    async def _boot(self, config: SandboxRuntimeConfig) -> None:
        """Start the first program in the control group and call `_take_files`. Raises OSError or SandboxError."""

    @abstractmethod
    async def _wait_for_exit(self) -> int | None:
        """Wait for the end of the first program; return its exit code (-n or 128 + n for signal n), None if unknown."""

    def _take_files(self, fds: list[int], pid: int) -> None:
        """Take what the first program, with process id `pid`, handed out."""
        self._directory_fd, listener_fd = fds
        self._listener = socket.socket(fileno=listener_fd)
        self._listener.setblocking(False)
        earlier_fd, self._first_process_fd = self._first_process_fd, os.pidfd_open(pid)  # fails if it has ended
        if earlier_fd >= 0:
            os.close(earlier_fd)
        self.channel.start()

    @staticmethod
    def _explain(reason: str, config: SandboxRuntimeConfig) -> SandboxError:
        """Return the error of a sandbox that did not start."""
        limit = config.limits.max_processes
        if limit is not None and os.strerror(errno.EAGAIN) in reason:
            reason += f"; runtime.limits.max_processes = {limit} is probably too low"
        return SandboxError(f"a sandbox cannot be started: {reason}")

    @abstractmethod
    async def _wait_until_gone(self) -> None:
        """Wait until all processes of the sandbox are gone. Raises SandboxError if they are not after some seconds."""

    def set_limits(self, limits: ResourceLimits) -> None:
        """Apply limits to the sandbox."""
        if self._cgroup is not None:
            self._cgroup.set_limits(limits)

    def take_directory_fd(self) -> int:
        """Return the open directory of the sandbox's files; the caller closes it."""
        directory_fd, self._directory_fd = self._directory_fd, -1
        return directory_fd

    def take_listener(self) -> socket.socket:
        """Return the socket that listens in the sandbox's network; the caller closes it."""
        listener, self._listener = self._listener, None
        assert listener is not None
        return listener

    async def find_end_error(self) -> RamifyError:
        """Return the error of an ended sandbox: SandboxError if nothing inside can have caused it, else AgentFailed.

        The programs of a sandbox run as the same user as its first program. What they can do to it is limited:

        - Signals do not reach it, since it is process 1 of their namespace and handles only SIGCHLD. The processor time
          after which the kernel kills it cannot be set from inside: the filter refuses limits of other processes.
        - Its memory and files are closed to them (`sandbox_init`), so they cannot make it exit with a chosen code.
        - They can use up the memory of the control group. The kernel counts the processes that it kills for this.
        - Its parent, bwrap or the template, is outside of their namespace.

        So a signal that killed the parent, or SIGKILL for the first program, came from outside if no process was killed
        for lack of memory. Without a control group nothing tells whether the memory was used up, and the machine is
        blamed.
        """
        exit_code: int | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                exit_code = await self._wait_for_exit()
        if self._cgroup is not None and self._cgroup.num_oom_kills():
            return AgentFailed("the sandbox has ended: its programs used more memory than the limit")
        if not self._is_killed and (exit_code is None or exit_code < 0 or exit_code == KILLED_EXIT_CODE):
            return SandboxError("the sandbox was killed from outside; look for what kills processes on this machine")
        return AgentFailed("the sandbox has ended: its first program ended")

    def kill(self) -> None:
        """Kill all processes of the sandbox: the kernel does so with the first of them."""
        self._is_killed = True
        if self._first_process_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first_process_fd, signal.SIGKILL)

    async def stop(self) -> None:
        """Kill all processes of the sandbox, wait until they are gone, and release what it held. May be repeated."""
        self.kill()
        await self._wait_until_gone()
        if hasattr(self, "channel"):
            self.channel.close()
        if self._listener is not None:
            self._listener.close()
        for fd in (self._first_process_fd, self._directory_fd):
            if fd >= 0:
                os.close(fd)
        self._first_process_fd = self._directory_fd = -1
        if self._cgroup is not None:
            await asyncio.to_thread(self._cgroup.remove)
            self._cgroup = None


class BwrapSandbox(RunningSandbox):
    """A sandbox that bubblewrap has started."""

    def __init__(self, disk_mb: int | None) -> None:
        super().__init__(disk_mb)
        self._stack = contextlib.ExitStack()
        self._bwrap: asyncio.subprocess.Process | None = None
        self._bwrap_fd = -1

    async def _boot(self, config: SandboxRuntimeConfig) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = SandboxChannel(ours)
        info_read, info_write = os.pipe()
        error_read, error_write = os.pipe()
        with contextlib.ExitStack() as child_files:
            child_files.callback(os.close, info_write)
            child_files.callback(os.close, error_write)
            child_files.enter_context(theirs)
            info = self._stack.enter_context(os.fdopen(info_read, "rb"))
            errors = self._stack.enter_context(os.fdopen(error_read, "rb", 0))
            filter_fd = create_sealed_file("seccomp", build_seccomp_filter() or b"")
            child_files.callback(os.close, filter_fd)
            fds = {"control": theirs.fileno(), "info": info_write, "seccomp": filter_fd}
            self._bwrap = await asyncio.create_subprocess_exec(
                *build_bwrap_command(config, self.disk_mb, fds, self._cgroup),
                # Only pipes, sockets and sealed files in memory: a program that opened a file of the machine through
                # /proc could write to the machine's disk, and change the mode of a device.
                stdin=error_write,
                stdout=error_write,
                stderr=error_write,
                pass_fds=list(fds.values()),
                env={"PATH": os.defpath},  # the sandbox sees the environment of bubblewrap's own process
                cwd="/",
                start_new_session=True,
            )
        with contextlib.suppress(ProcessLookupError):  # it has exited already; its channel is closed then
            self._bwrap_fd = os.pidfd_open(self._bwrap.pid)
        message, fds_received, _ = await receive(ours, 2)
        if message != b"ready" or len(fds_received) != 2:
            os.set_blocking(error_read, False)
            reason = (errors.read(MAX_REASON_BYTES) or b"").decode(errors="replace").strip()
            raise self._explain(reason or "bwrap gave no reason", config)
        errors.close()  # nobody reads it from now on, and a write fails
        self._take_files(fds_received, int(json.loads(await asyncio.to_thread(info.read))["child-pid"]))

    async def _wait_for_exit(self) -> int | None:
        assert self._bwrap is not None
        return await self._bwrap.wait()

    def kill(self) -> None:
        """Kill all processes of the sandbox, but not bwrap, which reaps the first of them and exits."""
        super().kill()
        if self._first_process_fd < 0 and self._bwrap_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._bwrap_fd, signal.SIGKILL)

    async def _wait_until_gone(self) -> None:
        if self._bwrap is not None:
            await wait_for_end(self._bwrap, "the sandbox")
        if self._bwrap_fd >= 0:
            os.close(self._bwrap_fd)
        self._bwrap_fd = -1
        self._stack.close()


async def wait_for_end(process: asyncio.subprocess.Process, name: str) -> None:
    """Wait for the exit of `process`, the parent of a killed sandbox or template. Kill it after STOP_TIMEOUT.

    Raises SandboxError if it had to be killed, which may leave processes of the sandbox.
    """
    try:
        async with asyncio.timeout(STOP_TIMEOUT):
            await process.wait()
    except TimeoutError as error:
        with contextlib.suppress(ProcessLookupError):  # it may have just exited
            process.kill()
        raise SandboxError(f"{name} {process.pid} did not end after {STOP_TIMEOUT:g} s") from error


@cache
def _sweep_groups_once() -> None:
    """Remove the control groups of killed processes. Once per process is enough: an empty group uses no resources."""
    with contextlib.suppress(SandboxError):  # `clean` reports what cannot be removed
        list(remove_leftovers(find_leftover_groups(SWEEP_TIMEOUT)))
