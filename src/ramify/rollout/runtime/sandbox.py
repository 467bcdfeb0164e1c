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
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from ramify.core.errors import ConfigInvalid, SandboxError
from ramify.env.runtime import Capabilities, CommandLine, Runtime, RuntimeConfig, build_argv
from ramify.env.task import Task
from ramify.rollout.runtime.bwrap import (
    SANDBOX_DIR,
    WORK_DIR,
    build_env,
    find_capabilities,
    find_unsupported_reason,
)
from ramify.rollout.runtime.cgroup import find_leftover_groups
from ramify.rollout.runtime.config import SandboxRuntimeConfig
from ramify.rollout.runtime.owner import remove_leftovers
from ramify.rollout.runtime.port_forward import PortForward
from ramify.rollout.runtime.running_sandbox import BwrapSandbox, RunningSandbox
from ramify.rollout.runtime.sandbox_files import SandboxFiles
from ramify.rollout.runtime.sandbox_process import SandboxProcess
from ramify.rollout.runtime.template import ForkedSandbox, SandboxTemplate


class SandboxRuntime(Runtime):
    """A runtime whose programs see nothing of the machine but its read-only system directories."""

    config: SandboxRuntimeConfig

    def __init__(self, config: SandboxRuntimeConfig | None = None, template: SandboxTemplate | None = None) -> None:
        super().__init__(config or SandboxRuntimeConfig())
        self._template = template
        self._sandbox: RunningSandbox | None = None
        self._relative_workdir = PurePath()
        self._files: SandboxFiles | None = None
        self._forward: PortForward | None = None
        self._stopped = False

    @property
    def workdir(self) -> Path:
        """The work directory, as programs see it."""
        return Path(WORK_DIR) / self._relative_workdir

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
        process = SandboxProcess(
            sandbox.channel, sandbox.kill, sandbox.find_end_error, self.config.max_output_bytes, interactive=interactive
        )
        variables = {**build_env(self.config), **(env or {})}
        await process.start(build_argv(command), variables, str(self.workdir / (cwd or "")), stdin)
        return process

    async def spawn_agent(
        self, command: CommandLine, *, env: Mapping[str, str] | None = None, stdin: bytes | None = None
    ) -> SandboxProcess:
        """Start the agent's program: in a forked sandbox by a fork, which has its packages."""
        sandbox = await self._get_sandbox()
        if self._template is None or not sandbox.is_forked:
            return await self.spawn(command, env=env, stdin=stdin)
        process = SandboxProcess(
            sandbox.channel, sandbox.kill, sandbox.find_end_error, self.config.max_output_bytes, interactive=False
        )
        argv = build_argv(command)[len(self._template.preload.python) :]
        variables = {**build_env(self.config), **(env or {})}
        await process.start(argv, variables, str(self.workdir), stdin, is_preloaded=True)
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

    async def _start_sandbox(self, disk_mb: int | None) -> RunningSandbox:
        if (template := self._template) is not None and (running := await template.get_running()) is not None:
            forked = ForkedSandbox(disk_mb, running)
            await self._start_or_remove(forked)
            if forked.refusal is None:
                return forked
            template.refuse(forked.refusal)
            await self._remove_sandbox()
        return await self._start_or_remove(BwrapSandbox(disk_mb))

    async def _start_or_remove(self, sandbox: RunningSandbox) -> RunningSandbox:
        self._sandbox = sandbox
        try:
            await sandbox.start(self.config)
        except BaseException:
            with contextlib.suppress(SandboxError):  # `stop` tries again and reports it
                await self._remove_sandbox()
            raise
        return sandbox

    async def _remove_sandbox(self) -> None:
        """Stop the sandbox, if there is one. After a failure, this can be called again."""
        if self._sandbox is not None:
            await self._sandbox.stop()
            self._sandbox = None

    async def _get_sandbox(self) -> RunningSandbox:
        if self._sandbox is None or self._stopped:
            raise SandboxError("the runtime was stopped or not started; it cannot run anything")
        if self._sandbox.channel.is_closed:
            raise await self._sandbox.find_end_error()
        return self._sandbox

    async def _get_files(self) -> SandboxFiles:
        await self._get_sandbox()
        assert self._files is not None
        return self._files
