"""The common part of runtimes whose sandbox has a shell but no code of Ramify.

A subclass starts the sandbox, and `_open_shell` runs `sh` in it with given arguments, environment and input. Scripts in
the sandbox do the rest (`shell_process`, `shell_files`), so any image with `sh`, `cat`, `head` and `tar` works.
"""

import asyncio
import contextlib
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import urlsplit

from ramify.core.errors import AgentFailed, ConfigInvalid, RamifyError, SandboxError
from ramify.env.runtime import CommandLine, ExecResult, Runtime, RuntimeConfig, build_argv
from ramify.env.task import Task
from ramify.processes.cleanup import MARKER_VARIABLE
from ramify.rollout.runtime.shell_files import ShellFiles
from ramify.rollout.runtime.shell_process import (
    KILL_SCRIPT,
    KILL_TIMEOUT,
    KillFunction,
    SandboxUnreachable,
    ShellProcess,
    check_arguments,
)

SCRIPT_TIMEOUT = 300.0  # seconds for a script that copies files

# Relative work directories are made by the runtime, and any user of the image may write to them.
WORKDIR_SCRIPT = '[ -d "$1" ] || { mkdir -p "$1" && chmod 0777 "$1"; } && cd "$1" && pwd -P'


class ShellRuntime(Runtime):
    """A runtime whose programs and files are reached through a shell in its sandbox."""

    def __init__(self, config: RuntimeConfig, workdir: str) -> None:
        super().__init__(config)
        self._default_workdir = self._workdir = PurePosixPath(workdir)
        self._processes: list[ShellProcess] = []  # may contain exited ones
        self._files: ShellFiles | None = None
        self._variables = {"TMPDIR": "/tmp"}  # of every program, besides the configured ones

    @property
    def workdir(self) -> Path:
        """The work directory, as programs see it."""
        return Path(self._workdir)

    def check_task(self, task: Task) -> None:
        """Raise ConfigInvalid if this runtime lacks what the task needs."""
        super().check_task(task)
        if task.workdir is not None and ".." in PurePath(task.workdir).parts:
            raise ConfigInvalid(f"the task's workdir {task.workdir!r} is outside of the rollout's work directory")

    async def stop(self) -> None:
        """Remove the sandbox, and copy its work directory out first if `keep_workdir` is set."""
        files, self._files = self._files, None
        try:
            if files is not None and self.config.keep_workdir:
                copy = Path(tempfile.mkdtemp(prefix="ramify-kept-"))
                await files.download(self.workdir, copy)
                self._kept_workdir = copy
        finally:
            await self._remove_sandbox()

    async def spawn(
        self,
        command: CommandLine,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | PurePath | None = None,
        stdin: bytes | None = None,
        interactive: bool = False,
    ) -> ShellProcess:
        """Start a program in the sandbox, with the environment of its image and the configured variables."""
        argv = build_argv(command)
        variables = {**self._variables, **self.config.env, **(env or {})}
        check_variables(variables)
        process = self._make_process(self.config.max_output_bytes, self._kill_marked, interactive=interactive)
        await self._start_process(process, argv, variables, str(self._workdir / (cwd or "")), stdin)
        return process

    async def read(self, path: str | PurePath) -> bytes:
        """Return the content of a file of the sandbox."""
        return await self._get_files().read(path)

    async def write(self, path: str | PurePath, data: bytes | str) -> None:
        """Write a file of the sandbox. Raises OSError if its disk is full."""
        await self._get_files().write(path, data.encode() if isinstance(data, str) else data)

    async def upload(self, source: Path, target: str | PurePath) -> None:
        """Copy the regular files of a directory of this machine into the sandbox."""
        await self._get_files().upload(source, target)

    async def download(self, source: str | PurePath, target: Path) -> None:
        """Copy the regular files of a directory of the sandbox to this machine."""
        await self._get_files().download(source, target)

    @abstractmethod
    async def _remove_sandbox(self) -> None:
        """Remove the sandbox, if there is one. After a failure, this can be called again."""

    @abstractmethod
    def _make_process(
        self, max_output_bytes: int, kill_marked: KillFunction | None, *, interactive: bool
    ) -> ShellProcess:
        """Return a process that is not started. Raises SandboxError if there is no sandbox."""

    @abstractmethod
    async def _open_shell(
        self, process: ShellProcess, args: Sequence[str], env: Mapping[str, str], stdin: bytes | None
    ) -> None:
        """Run `sh` with these arguments in the sandbox, and connect its streams to the process."""

    @abstractmethod
    async def _raise_unreachable(self, reason: str) -> None:
        """Raise AgentFailed if the sandbox has ended, else SandboxError."""

    async def _kill_marked(self, marker: str) -> None:
        """Kill the programs of the sandbox that carry a marker. Raises SandboxError if that is not possible."""
        try:
            result = await self._run_script(KILL_SCRIPT, marker, stdin=None, max_output=1000, timeout=KILL_TIMEOUT)
        except AgentFailed:
            return  # the sandbox has ended, and all its programs
        if result.returncode:
            raise SandboxError(f"programs of the sandbox cannot be killed: {result.error_text}")

    async def _prepare_workdir(self, task: Task) -> None:
        """Create the work directory of a task, and remember it without links in its path."""
        workdir = self._default_workdir / (task.workdir or "")
        result = await self._make_workdir(str(workdir))
        if result.returncode or not result.stdout.startswith(b"/"):
            reason = result.error_text.strip()
            raise SandboxError(f"the work directory {workdir} cannot be made: {reason}")
        self._workdir = PurePosixPath(result.text.rstrip("\n"))
        self._files = ShellFiles(self._run_script, self._workdir, self.config.max_file_mb)

    async def _make_workdir(self, workdir: str) -> ExecResult:
        """Create the work directory; the result's output is its path without links."""
        return await self._run_script(WORKDIR_SCRIPT, workdir, stdin=None, max_output=10_000)

    def _get_files(self) -> ShellFiles:
        if self._files is None:
            raise SandboxError("the runtime was stopped or not started; it has no files")
        return self._files

    async def _run_script(
        self, script: str, *args: str, stdin: bytes | None, max_output: int, timeout: float = SCRIPT_TIMEOUT
    ) -> ExecResult:
        """Run a shell script in the sandbox, without a marker in its environment."""
        check_arguments(args)
        process = self._make_process(max_output, None, interactive=False)
        await self._start_process(process, ["sh", "-c", script, "sh", *args], None, "/", stdin)
        try:
            return await process.wait(timeout)
        except asyncio.CancelledError:
            await process.close()
            raise

    async def _start_process(
        self,
        process: ShellProcess,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str,
        stdin: bytes | None,
    ) -> None:
        has_stdin = process.can_end_input if process.is_interactive else stdin is not None
        args = process.build_arguments(argv, cwd, has_stdin=has_stdin)
        self._processes = [other for other in self._processes if not other.is_closed] + [process]
        variables = {} if env is None else {**env, MARKER_VARIABLE: process.marker}
        try:
            await self._open_shell(process, args, variables, stdin)
            await process.wait_started()
        except SandboxUnreachable as error:
            await process.close()
            await self._raise_unreachable(str(error))
        except (OSError, SandboxError):
            await process.close()
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(RamifyError):  # a cancellation stays one; `stop` removes the sandbox
                await process.kill()
            raise


def check_variables(variables: Mapping[str, str]) -> None:
    """Raise ValueError if a shell cannot set an environment variable."""
    check_arguments([*variables.values()])
    for name in variables:
        if not (name.isascii() and name.isidentifier()):
            raise ValueError(f"{name!r} is not the name of an environment variable")


def replace_address(base_url: str, gateway_url: str) -> str:
    """Return a URL with the scheme, host and port of another."""
    address = urlsplit(gateway_url)
    return urlsplit(base_url)._replace(scheme=address.scheme, netloc=address.netloc).geturl()
