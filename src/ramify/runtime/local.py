"""The local runtime: a temporary directory and processes of this machine.

Programs are not isolated from the rest of the machine, but all of them are killed at the end. Each program leads its
own session and has a marker in its environment, which all processes it starts inherit (see
`ramify.processes.cleanup`). The directory is created on first use: most rollouts do not need one.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import IO

from ramify.env.runtime import TIMEOUT_EXIT_CODE, CommandLine, ExecResult, Runtime, RuntimeProcess
from ramify.env.task import Task
from ramify.errors import ConfigInvalid, SandboxError
from ramify.processes.cleanup import MARKER_VARIABLE, kill_marked_processes, kill_process_group
from ramify.runtime.bounded_output import BoundedOutput
from ramify.runtime.config import LocalRuntimeConfig

OUTPUT_DRAIN_TIMEOUT = 0.2  # seconds to read output after an exit: a background child may keep the pipes open
REMOVE_TIMEOUT = 20.0  # seconds for `rm` to remove a directory that Python could not remove
# errors caused by the machine, not by the command
RESOURCE_ERRNOS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)


class LocalRuntime(Runtime):
    """A runtime that is a directory with `home`, `tmp` and `work`, in which programs run without isolation."""

    config: LocalRuntimeConfig  # pyright: ignore[reportIncompatibleVariableOverride] - a plugin narrows it

    def __init__(self, config: LocalRuntimeConfig | None = None) -> None:
        super().__init__(config or LocalRuntimeConfig())
        self._marker = f"{uuid.uuid4().hex}."
        self._sandbox_dir: Path | None = None
        self._relative_workdir = PurePath()
        self._processes: list[LocalProcess] = []  # may contain exited ones
        self._num_spawned = 0
        self._stopped = False

    @property
    def workdir(self) -> Path:
        """The work directory, which is created on first use. Raises SandboxError after `stop`."""
        if self._stopped:
            raise SandboxError("the runtime was stopped; it cannot run anything any more")
        if self._sandbox_dir is None:
            self._sandbox_dir = self._create_sandbox()
        return self._sandbox_dir / "work" / self._relative_workdir

    def check_task(self, task: Task) -> None:
        """Raise ConfigInvalid if the task needs an image or has a work directory outside of the rollout's."""
        if task.image is not None:
            raise ConfigInvalid(
                f"the task needs the image {task.image!r}, but the local runtime does not support images"
            )
        if task.workdir is not None and (PurePath(task.workdir).is_absolute() or ".." in PurePath(task.workdir).parts):
            raise ConfigInvalid(f"the task's workdir {task.workdir!r} is outside of the rollout's work directory")

    async def start(self, task: Task) -> None:
        """Check the task and remember its work directory, which is created on first use."""
        self.check_task(task)
        self._relative_workdir = PurePath(task.workdir or "")

    async def stop(self) -> None:
        """Kill all programs and remove the work directory, unless `keep` is set."""
        self._stopped = True
        for process in self._processes:
            process.kill_process_group()
        if self._num_spawned:
            await asyncio.to_thread(kill_marked_processes, self._marker)
        if self._sandbox_dir is not None and not self.config.keep_workdir:
            await asyncio.to_thread(_remove_sandbox, self._sandbox_dir)

    async def spawn(
        self,
        command: CommandLine,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | PurePath | None = None,
        stdin: bytes | None = None,
    ) -> "LocalProcess":
        """Start a program in a process group of its own, with the configured environment variables only."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        workdir = self.workdir
        self._num_spawned += 1
        process = LocalProcess(f"{self._marker}{self._num_spawned}.", self.config.max_output_bytes)
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: process,
                *argv,
                stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
                cwd=workdir / (cwd or ""),
                env={**self._build_env(workdir), **(env or {}), MARKER_VARIABLE: process.marker},
                start_new_session=True,
            )
        except OSError as error:
            if error.errno in RESOURCE_ERRNOS or not workdir.is_dir():
                raise SandboxError(f"cannot run {argv[0]!r} in {workdir}: {error}") from error
            raise
        except asyncio.CancelledError:  # asyncio kills the program, but not what it has started already
            await asyncio.to_thread(kill_marked_processes, process.marker)
            raise
        self._processes = [other for other in self._processes if not other.has_exited] + [process]
        process.write_stdin(stdin)
        return process

    async def read(self, path: str | PurePath) -> bytes:
        """Return the content of a file below the work directory."""
        return await asyncio.to_thread(_read_file, self.workdir / path)

    async def write(self, path: str | PurePath, data: bytes | str) -> None:
        """Write a file below the work directory. Raises SandboxError if the machine lacks resources."""
        file_path = self.workdir / path
        try:
            await asyncio.to_thread(_write_file, file_path, data.encode() if isinstance(data, str) else data)
        except OSError as error:
            if error.errno in RESOURCE_ERRNOS:
                raise SandboxError(f"{file_path} cannot be written: {error.strerror}") from error
            raise

    def _create_sandbox(self) -> Path:
        try:
            sandbox_dir = Path(tempfile.mkdtemp(prefix="ramify-", dir=self.config.workdir_root))
            for name in ("home", "tmp", PurePath("work") / self._relative_workdir):
                (sandbox_dir / name).mkdir(parents=True)
        except OSError as error:
            parent = self.config.workdir_root or tempfile.gettempdir()
            raise SandboxError(f"cannot create a work directory in {parent}: {error}") from error
        return sandbox_dir

    def _build_env(self, workdir: Path) -> dict[str, str]:
        sandbox_dir = self._sandbox_dir or workdir
        inherited = {name: os.environ[name] for name in self.config.inherit_env if name in os.environ}
        return inherited | {"HOME": str(sandbox_dir / "home"), "TMPDIR": str(sandbox_dir / "tmp")} | self.config.env


class LocalProcess(RuntimeProcess, asyncio.SubprocessProtocol):
    """A process that leads a session, and all processes it started.

    asyncio's own `Process.wait` returns only after all pipes are closed, which never happens if a background server
    keeps them open. Here `wait` depends on the exit of the process only.
    """

    def __init__(self, marker: str, max_output: int) -> None:
        self.marker = marker
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pipes_closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outputs = {1: BoundedOutput(max_output), 2: BoundedOutput(max_output)}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Record the process id."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self.pid = transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep the output of the program, up to the limit."""
        self._outputs[fd].write(data)

    def process_exited(self) -> None:
        """Record the exit code."""
        self._exited.set_result(self._transport.get_returncode() or 0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the pipes of the program are closed."""
        self._pipes_closed.set_result(None)

    @property
    def has_exited(self) -> bool:
        """Whether the process itself has exited; its children may still run."""
        return self._exited.done()

    def write_stdin(self, stdin: bytes | None) -> None:
        """Write all of standard input and close it."""
        pipe = self._transport.get_pipe_transport(0)
        if isinstance(pipe, asyncio.WriteTransport):
            pipe.write(stdin or b"")
            pipe.write_eof()

    def kill_process_group(self) -> None:
        """Kill the process group at once. `kill` also finds processes that have left the group."""
        if not self.has_exited:
            kill_process_group(self.pid)

    async def wait(self, timeout: float) -> ExecResult:
        """Wait until the program exits, or kill it after `timeout` seconds, and return its output."""
        timed_out = not (await asyncio.wait([self._exited], timeout=timeout))[0]
        if timed_out:
            await self.kill()
        await asyncio.wait([self._pipes_closed], timeout=OUTPUT_DRAIN_TIMEOUT)
        self._transport.close()
        returncode = TIMEOUT_EXIT_CODE if timed_out else self._exited.result()
        return ExecResult(returncode, self._outputs[1].getvalue(), self._outputs[2].getvalue(), timed_out)

    async def kill(self) -> None:
        """Kill the process group and all processes that carry the program's marker."""
        self.kill_process_group()
        await asyncio.to_thread(kill_marked_processes, self.marker)
        self._transport.close()


def _open_regular_file(path: Path, mode: str) -> IO[bytes]:
    """Open a regular file. Opening or reading a named pipe that an agent created could block forever."""
    file = open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(errno.ENOENT, "not a file", str(path))
    return file


def _read_file(path: Path) -> bytes:
    with _open_regular_file(path, "rb") as file:
        return file.read()


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _open_regular_file(path, "wb") as file:
        file.write(data)


def _remove_sandbox(sandbox_dir: Path) -> None:
    """Remove the directory, even if it is nested too deep for Python or has directories without permissions."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(sandbox_dir, ignore_errors=True)
    if sandbox_dir.exists():
        argv = ["/bin/sh", "-c", 'chmod -R u+rwX "$0"; rm -rf "$0"', str(sandbox_dir)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(argv, stderr=subprocess.DEVNULL, check=False, timeout=REMOVE_TIMEOUT)
    if sandbox_dir.exists():
        raise SandboxError(f"the work directory {sandbox_dir} cannot be removed")
