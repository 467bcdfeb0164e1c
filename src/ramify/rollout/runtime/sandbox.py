"""The sandbox runtime: programs in namespaces of their own, made by bubblewrap.

A sandbox has its own processes, users, network and mounts. It sees the system's programs read-only, one directory of
its own in memory, and no file, socket or process of the machine besides. Its network has a single listening socket,
which leads to the gateway of its rollout. A seccomp filter refuses the system calls that could undo this.

    prepare   bwrap starts `sandbox_init`, which hands out the sandbox's directory and its listening socket
    start     the limits of the task are set
    spawn     `sandbox_init` starts the program with pipes of this process as its standard files
    stop      `sandbox_init` is killed; the kernel kills all others with it, and its files are gone

Nothing of a sandbox outlives this process: bubblewrap is killed with its parent. Only an empty control group can be
left, which `clean` removes.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from ramify.core.errors import AgentFailed, ConfigInvalid, RamifyError, SandboxError
from ramify.env.runtime import Capabilities, CommandLine, ResourceLimits, Runtime, RuntimeConfig, build_argv
from ramify.env.task import Task
from ramify.processes.exit_codes import SIGNAL_EXIT_OFFSET
from ramify.rollout.runtime.bwrap import (
    SANDBOX_DIR,
    WORK_DIR,
    build_bwrap_command,
    build_seccomp_filter,
    find_capabilities,
    find_unsupported_reason,
    parse_child_pid,
)
from ramify.rollout.runtime.cgroup import Cgroup, find_cgroup_parents, find_leftover_groups
from ramify.rollout.runtime.config import SandboxRuntimeConfig
from ramify.rollout.runtime.owner import remove_leftovers
from ramify.rollout.runtime.port_forward import PortForward
from ramify.rollout.runtime.sandbox_files import SandboxFiles
from ramify.rollout.runtime.sandbox_process import SandboxChannel, SandboxProcess, create_sealed_file

BOOT_TIMEOUT = 20.0  # seconds for a sandbox to report that it is ready
KILLED_EXIT_CODE = SIGNAL_EXIT_OFFSET + signal.SIGKILL  # of bwrap, for its first process
MAX_REASON_BYTES = 2000  # of bwrap's standard error, in an error message
STOP_TIMEOUT = 10.0  # seconds for the kernel to end a sandbox
SWEEP_TIMEOUT = 0.2  # seconds for a leftover control group to become empty


class SandboxRuntime(Runtime):
    """A runtime whose programs see nothing of the machine but its read-only system directories."""

    config: SandboxRuntimeConfig  # pyright: ignore[reportIncompatibleVariableOverride] - a plugin narrows it

    def __init__(self, config: SandboxRuntimeConfig | None = None) -> None:
        super().__init__(config or SandboxRuntimeConfig())
        self._sandbox: _RunningSandbox | None = None
        self._relative_workdir = PurePath()
        self._files: SandboxFiles | None = None
        self._forward: PortForward | None = None
        self._kept_workdir: Path | None = None
        self._stopped = False

    @property
    def workdir(self) -> Path:
        """The work directory, as programs see it."""
        return Path(WORK_DIR) / self._relative_workdir

    @property
    def kept_workdir(self) -> Path | None:
        """The copy of the work directory."""
        return self._kept_workdir

    @property
    def capabilities(self) -> Capabilities:
        """Isolation and a private network always; limits where this process may create control groups."""
        return find_capabilities()

    def check_task(self, task: Task) -> None:
        """Raise ConfigInvalid if there is no sandbox on this machine, or if it lacks what the task needs."""
        if reason := find_unsupported_reason():
            raise ConfigInvalid(f"the runtime 'sandbox' does not work on this machine: {reason}")
        super().check_task(task)
        if task.workdir is not None and ".." in PurePath(task.workdir).parts:
            raise ConfigInvalid(f"the task's workdir {task.workdir!r} is outside of the rollout's work directory")
        if task.workdir is not None and PurePath(task.workdir).is_absolute():
            raise ConfigInvalid(f"the task's workdir {task.workdir!r} must be relative to the work directory")

    async def prepare(self) -> None:
        """Start the sandbox with the limits of the configuration."""
        if self._sandbox is None and not self._stopped:
            await self._start_sandbox(self.config.limits.disk_mb)

    async def start(self, task: Task) -> None:
        """Take the prepared sandbox, or start one, and apply the task's limits."""
        self.check_task(task)
        limits = self.get_limits(task)
        # the size of a sandbox's files is fixed, and a prepared sandbox may have been killed meanwhile
        if self._sandbox is not None and (limits.disk_mb != self._sandbox.disk_mb or not self._sandbox.is_running):
            await self._remove_sandbox()
        sandbox = self._sandbox or await self._start_sandbox(limits.disk_mb)
        sandbox.set_limits(limits)
        self._relative_workdir = PurePath(task.workdir or "")
        files = SandboxFiles(
            sandbox.take_directory_fd(),
            PurePath(SANDBOX_DIR),
            PurePath(self.workdir).relative_to(SANDBOX_DIR),
            self.config.max_file_mb,
        )
        self._files = files
        await asyncio.to_thread(files.make_directory, self.workdir)

    async def stop(self) -> None:
        """Kill the sandbox; its files go with it, or are copied out first if `keep_workdir` is set."""
        self._stopped = True
        forward, self._forward = self._forward, None
        if forward is not None:
            await forward.close()
        files, self._files = self._files, None
        try:
            if files is not None and self.config.keep_workdir:
                copy = Path(tempfile.mkdtemp(prefix="ramify-kept-"))
                await asyncio.to_thread(files.download, WORK_DIR, copy)
                self._kept_workdir = copy / self._relative_workdir
        finally:
            if files is not None:
                files.close()
            await self._remove_sandbox()

    async def spawn(
        self,
        command: CommandLine,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | PurePath | None = None,
        stdin: bytes | None = None,
        interactive: bool = False,
    ) -> SandboxProcess:
        """Start a program in the sandbox, with the configured environment variables only."""
        sandbox = await self._get_sandbox()
        argv = build_argv(command)
        process = SandboxProcess(
            sandbox.channel, sandbox.kill, sandbox.find_end_error, self.config.max_output_bytes, interactive=interactive
        )
        await process.start(argv, {**self._build_env(), **(env or {})}, str(self.workdir / (cwd or "")), stdin)
        return process

    async def read(self, path: str | PurePath) -> bytes:
        """Return the content of a file of the sandbox."""
        return await asyncio.to_thread((await self._get_files()).read, path)

    async def write(self, path: str | PurePath, data: bytes | str) -> None:
        """Write a file of the sandbox. Raises OSError if its disk is full."""
        files = await self._get_files()
        await asyncio.to_thread(files.write, path, data.encode() if isinstance(data, str) else data)

    async def upload(self, source: Path, target: str | PurePath) -> None:
        """Copy the regular files of a directory of this machine into the sandbox."""
        await asyncio.to_thread((await self._get_files()).upload, source, target)

    async def download(self, source: str | PurePath, target: Path) -> None:
        """Copy a regular file, or the regular files of a directory, from the sandbox to this machine."""
        await asyncio.to_thread((await self._get_files()).download, source, target)

    async def expose(self, base_url: str) -> str:
        """Forward the sandbox's listening socket to the server of `base_url`; return the URL that reaches it."""
        sandbox = await self._get_sandbox()
        url = urlsplit(base_url)
        if self._forward is not None or url.hostname is None or url.port is None:
            raise ConfigInvalid(f"a sandbox exposes one address with a port; {base_url} cannot be exposed")
        listener = sandbox.take_listener()
        port = listener.getsockname()[1]
        self._forward = PortForward(url.hostname, url.port)
        await self._forward.start(listener)
        return url._replace(netloc=f"127.0.0.1:{port}").geturl()

    @classmethod
    def clean(cls, config: RuntimeConfig) -> Iterator[str]:
        """Remove the control groups of processes that have ended."""
        return remove_leftovers(find_leftover_groups())

    async def _start_sandbox(self, disk_mb: int | None) -> "_RunningSandbox":
        self._sandbox = _RunningSandbox(disk_mb)
        try:
            await self._sandbox.start(self.config)
        except BaseException:
            with contextlib.suppress(SandboxError):  # `stop` tries again and reports it
                await self._remove_sandbox()
            raise
        return self._sandbox

    async def _remove_sandbox(self) -> None:
        """Stop the sandbox, if there is one. After a failure, this can be called again."""
        if self._sandbox is not None:
            await self._sandbox.stop()
            self._sandbox = None

    async def _get_sandbox(self) -> "_RunningSandbox":
        if self._sandbox is None or self._stopped:
            raise SandboxError("the runtime was stopped or not started; it cannot run anything")
        if self._sandbox.channel.is_closed:
            raise await self._sandbox.find_end_error()
        return self._sandbox

    async def _get_files(self) -> SandboxFiles:
        await self._get_sandbox()
        assert self._files is not None
        return self._files

    def _build_env(self) -> dict[str, str]:
        search_path = [*self.config.prepend_path, f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
        return {
            "PATH": ":".join(dict.fromkeys(search_path)),
            "HOME": f"{SANDBOX_DIR}/home",
            "TMPDIR": f"{SANDBOX_DIR}/tmp",
            "USER": "agent",
            "LANG": "C.UTF-8",
        } | self.config.env


class _RunningSandbox:
    """A running bubblewrap process with its first program, and what that handed out."""

    def __init__(self, disk_mb: int | None) -> None:
        self.disk_mb = disk_mb
        self._stack = contextlib.ExitStack()
        self._bwrap: asyncio.subprocess.Process | None = None
        self._bwrap_fd = self._first_process_fd = -1
        self._directory_fd = -1
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
        try:
            async with asyncio.timeout(BOOT_TIMEOUT):
                await self._boot(config)
        except TimeoutError as error:
            raise SandboxError(f"a sandbox was not ready after {BOOT_TIMEOUT:g} s") from error
        except OSError as error:
            raise SandboxError(f"a sandbox cannot be started: {error}") from error
        self._is_ready = True

    async def _boot(self, config: SandboxRuntimeConfig) -> None:
        if find_cgroup_parents().directories:
            await asyncio.to_thread(_sweep_groups_once)
            self._cgroup = await asyncio.to_thread(Cgroup)
            self._cgroup.set_limits(config.limits)
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
        message, fds_received = await self.channel.receive_first(2)
        if message != b"ready" or len(fds_received) != 2:
            os.set_blocking(error_read, False)
            reason = (errors.read(MAX_REASON_BYTES) or b"").decode(errors="replace").strip()
            limit = config.limits.max_processes
            if limit is not None and os.strerror(errno.EAGAIN) in reason:
                reason += f"; runtime.limits.max_processes = {limit} is probably too low"
            raise SandboxError(f"a sandbox cannot be started: {reason or 'bwrap gave no reason'}")
        errors.close()  # nobody reads it from now on, and a write fails
        self._directory_fd, listener_fd = fds_received
        self._listener = socket.socket(fileno=listener_fd)
        self._listener.setblocking(False)
        self._first_process_fd = os.pidfd_open(parse_child_pid(await asyncio.to_thread(info.read)))
        self.channel.start()

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
        - bwrap, its parent, is outside of their namespace. It exits with the first program, as 128 + n for signal n.

        So a signal that killed bwrap, or SIGKILL for the first program, came from outside if no process was killed for
        lack of memory. Without a control group nothing tells whether the memory was used up, and the machine is blamed.
        """
        assert self._bwrap is not None
        exit_code: int | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                exit_code = await self._bwrap.wait()
        if self._cgroup is not None and self._cgroup.num_oom_kills():
            return AgentFailed("the sandbox has ended: its programs used more memory than the limit")
        if not self._is_killed and (exit_code is None or exit_code < 0 or exit_code == KILLED_EXIT_CODE):
            return SandboxError("the sandbox was killed from outside; look for what kills processes on this machine")
        return AgentFailed("the sandbox has ended: its first program ended")

    def kill(self) -> None:
        """Kill all processes of the sandbox, but not bwrap, which reaps the first of them and exits."""
        self._is_killed = True
        fd = self._first_process_fd if self._first_process_fd >= 0 else self._bwrap_fd
        if fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    async def stop(self) -> None:
        """Kill all processes of the sandbox, wait until they are gone, and release what it held. May be repeated."""
        self.kill()
        if self._bwrap is not None:
            try:
                async with asyncio.timeout(STOP_TIMEOUT):
                    await self._bwrap.wait()
            except TimeoutError as error:
                with contextlib.suppress(ProcessLookupError):  # somebody may have stopped it
                    self._bwrap.kill()
                raise SandboxError(f"the sandbox {self._bwrap.pid} did not end after {STOP_TIMEOUT:g} s") from error
        if hasattr(self, "channel"):
            self.channel.close()
        if self._listener is not None:
            self._listener.close()
        for fd in (self._bwrap_fd, self._first_process_fd, self._directory_fd):
            if fd >= 0:
                os.close(fd)
        self._bwrap_fd = self._first_process_fd = self._directory_fd = -1
        self._stack.close()
        if self._cgroup is not None:
            await asyncio.to_thread(self._cgroup.remove)
            self._cgroup = None


@cache
def _sweep_groups_once() -> None:
    """Remove the control groups of killed processes. Once per process is enough: an empty group uses no resources."""
    with contextlib.suppress(SandboxError):  # `clean` reports what cannot be removed
        list(remove_leftovers(find_leftover_groups(SWEEP_TIMEOUT)))
