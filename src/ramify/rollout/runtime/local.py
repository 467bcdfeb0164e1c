"""The local runtime: a temporary directory and processes of this machine.

Programs are not isolated from the rest of the machine, but all of them are killed at the end. Each program leads its
own session and has a marker in its environment, which all processes it starts inherit (see
`ramify.processes.program`). The directory is created on first use: most rollouts do not need one.
"""

import asyncio
import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path, PurePath
from typing import ParamSpec, TypeVar

from ramify.core.errors import ConfigInvalid, SandboxError
from ramify.env.runtime import Capabilities, Capability, CommandLine, ResourceLimits, Runtime, RuntimeConfig, build_argv
from ramify.env.task import Task
from ramify.processes.cleanup import MARKER_VARIABLE, kill_marked_processes, kill_process_group
from ramify.processes.program import run_program
from ramify.rollout.runtime.cgroup import Cgroup, find_leftover_groups, find_limit_capabilities
from ramify.rollout.runtime.config import LocalRuntimeConfig
from ramify.rollout.runtime.owner import Leftover, is_owner_alive, make_owner_name, remove_leftovers
from ramify.rollout.runtime.piped_process import PipedProcess
from ramify.rollout.runtime.sandbox_files import SandboxFiles

P = ParamSpec("P")
T = TypeVar("T")
NO_LIMITS = ResourceLimits()
DIRECTORY_PREFIX = "ramify-"
MARKER_LENGTH = 16  # of a uuid; an empty marker would match every process
MARKER_PATTERN = re.compile(f"[0-9a-f]{{{MARKER_LENGTH}}}")
REMOVE_TIMEOUT = 20.0  # seconds for `rm` to remove a directory that Python could not remove
# errors caused by the machine, not by the command
RESOURCE_ERRNOS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)


class LocalRuntime(Runtime):
    """A runtime that is a directory with `home`, `tmp` and `work`, in which programs run without isolation."""

    config: LocalRuntimeConfig

    def __init__(self, config: LocalRuntimeConfig | None = None) -> None:
        super().__init__(config or LocalRuntimeConfig())
        self._marker = f"{uuid.uuid4().hex[:MARKER_LENGTH]}."
        self._creation_time = time.time()
        self._root_dir: Path | None = None
        self._open_files: SandboxFiles | None = None
        self._relative_workdir = PurePath()
        self._limits = NO_LIMITS
        self._cgroup: Cgroup | None = None
        self._processes: list[LocalProcess] = []  # may contain exited ones
        self._num_spawned = 0
        self._stopped = False

    @property
    def workdir(self) -> Path:
        """The work directory, which is created on first use. Raises SandboxError after `stop`."""
        return self._get_root_dir() / "work" / self._relative_workdir

    @property
    def kept_workdir(self) -> Path | None:
        """The work directory itself, if it was created."""
        if not self._stopped or self._root_dir is None or not self.config.keep_workdir:
            return None
        return self._root_dir / "work" / self._relative_workdir

    @property
    def capabilities(self) -> Capabilities:
        """Limits on memory, processes and cores, where this process may create control groups."""
        return _find_capabilities()

    def check_task(self, task: Task) -> None:
        """Raise ConfigInvalid if this runtime lacks what the task needs, or its work directory is outside."""
        super().check_task(task)
        if task.workdir is not None and (PurePath(task.workdir).is_absolute() or ".." in PurePath(task.workdir).parts):
            raise ConfigInvalid(f"the task's workdir {task.workdir!r} is outside of the rollout's work directory")

    async def start(self, task: Task) -> None:
        """Check the task and remember its work directory, which is created on first use."""
        self.check_task(task)
        self._relative_workdir = PurePath(task.workdir or "")
        self._limits = self.get_limits(task)
        if self._limits != NO_LIMITS:
            self._cgroup = await asyncio.to_thread(Cgroup)
            self._cgroup.set_limits(self._limits)

    async def stop(self) -> None:
        """Kill all programs and remove the work directory, unless `keep_workdir` is set."""
        self._stopped = True
        for process in self._processes:
            process.kill_process_group()
        if self._num_spawned:
            await asyncio.to_thread(kill_marked_processes, self._marker, started_after=self._creation_time)
        if self._open_files is not None:
            self._open_files.close()
        if self._cgroup is not None:
            await asyncio.to_thread(self._cgroup.remove)
            self._cgroup = None
        if self._root_dir is not None and not self.config.keep_workdir:
            await asyncio.to_thread(_remove_directory, self._root_dir)

    async def spawn(
        self,
        command: CommandLine,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | PurePath | None = None,
        stdin: bytes | None = None,
        interactive: bool = False,
    ) -> "LocalProcess":
        """Start a program in a process group of its own, with the configured environment variables only."""
        argv = build_argv(command)
        workdir = self.workdir
        self._num_spawned += 1
        process = LocalProcess(
            f"{self._marker}{self._num_spawned}.", self.config.max_output_bytes, interactive=interactive
        )
        variables, directory = {**self._build_env(), **(env or {})}, workdir / (cwd or "")
        try:
            if self._cgroup is not None:
                _check_program(argv[0], variables, directory)
            joined = argv if self._cgroup is None else self._cgroup.build_join_command(argv)
            await process.start(joined, variables, directory, stdin)
        except OSError as error:
            if error.errno in RESOURCE_ERRNOS or not workdir.is_dir():
                raise SandboxError(f"cannot run {argv[0]!r} in {workdir}: {error}") from error
            raise
        self._processes = [other for other in self._processes if not other.has_exited] + [process]
        return process

    async def read(self, path: str | PurePath) -> bytes:
        """Return the content of a file of the rollout's directory."""
        return await asyncio.to_thread(self._files.read, path)

    async def write(self, path: str | PurePath, data: bytes | str) -> None:
        """Write a file of the rollout's directory. Raises SandboxError if the machine lacks resources."""
        await _write_in_thread(self._files.write, path, data.encode() if isinstance(data, str) else data)

    async def upload(self, source: Path, target: str | PurePath) -> None:
        """Copy the regular files of a directory into the rollout's directory."""
        await _write_in_thread(self._files.upload, source, target)

    async def download(self, source: str | PurePath, target: Path) -> None:
        """Copy a regular file, or the regular files of a directory, out of the rollout's directory."""
        await _write_in_thread(self._files.download, source, target)

    async def expose(self, base_url: str) -> str:
        """Return the URL unchanged: programs share the network of the machine."""
        return base_url

    @classmethod
    def clean(cls, config: RuntimeConfig) -> Iterator[str]:
        """Kill the programs and remove the directories and control groups of processes that have ended."""
        parent = Path(getattr(config, "workdir_root", None) or tempfile.gettempdir())
        return remove_leftovers([*find_leftover_groups(), *_iter_leftover_directories(parent)])

    @property
    def _files(self) -> SandboxFiles:
        root_dir = self._get_root_dir()
        if self._open_files is None:
            root_fd = os.open(root_dir, os.O_RDONLY | os.O_DIRECTORY)
            workdir = PurePath("work") / self._relative_workdir
            self._open_files = SandboxFiles(root_fd, root_dir, workdir, self.config.max_file_mb)
        return self._open_files

    def _get_root_dir(self) -> Path:
        if self._stopped:
            raise SandboxError("the runtime was stopped; it cannot run anything any more")
        if self._root_dir is None:
            self._root_dir = self._create_root_dir()
        return self._root_dir

    def _create_root_dir(self) -> Path:
        parent = Path(self.config.workdir_root or tempfile.gettempdir())
        root_dir = parent / (DIRECTORY_PREFIX + make_owner_name(self._marker.rstrip(".")))
        try:
            root_dir.mkdir(mode=0o700)
            for name in ("home", "tmp", PurePath("work") / self._relative_workdir):
                (root_dir / name).mkdir(parents=True)
        except OSError as error:
            raise SandboxError(f"cannot create a work directory in {parent}: {error}") from error
        return root_dir

    def _build_env(self) -> dict[str, str]:
        root_dir = self._get_root_dir()
        inherited = {name: os.environ[name] for name in self.config.inherit_env if name in os.environ}
        return inherited | {"HOME": str(root_dir / "home"), "TMPDIR": str(root_dir / "tmp")} | self.config.env


class LocalProcess(PipedProcess):
    """A process that leads a session, and all processes it started."""

    def __init__(self, marker: str, max_output_bytes: int, *, interactive: bool) -> None:
        super().__init__(max_output_bytes, interactive=interactive)
        self.marker = marker
        self._creation_time = time.time()

    async def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, stdin: bytes | None) -> None:
        """Start the program. Raises OSError if it cannot be run, ValueError if an argument or variable is invalid."""
        try:
            await self.open_pipes(stdin)
            transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: _ExitWatcher(self),
                *argv,
                stdin=self.program_fds[0],
                stdout=self.program_fds[1],
                stderr=self.program_fds[2],
                cwd=cwd,
                env={**env, MARKER_VARIABLE: self.marker},
                start_new_session=True,
            )
        except BaseException as error:
            self.close_pipes()
            if isinstance(error, asyncio.CancelledError):  # asyncio kills the program, but not what it has started
                with contextlib.suppress(SandboxError):  # a cancellation stays one; `stop` tries again
                    await asyncio.to_thread(kill_marked_processes, self.marker, started_after=self._creation_time)
            raise
        self.close_program_fds()
        self.pid = transport.get_pid()

    def kill_process_group(self) -> None:
        """Kill the process group at once. `kill` also finds processes that have left the group."""
        if not self.has_exited:
            kill_process_group(self.pid)

    async def kill_tree(self) -> None:
        """Kill the process group and all processes that carry the program's marker."""
        self.kill_process_group()
        await asyncio.to_thread(kill_marked_processes, self.marker, started_after=self._creation_time)


class _ExitWatcher(asyncio.SubprocessProtocol):
    """Reports the exit code of a process."""

    def __init__(self, process: LocalProcess) -> None:
        self._process = process

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def process_exited(self) -> None:
        self._process.set_exit_code(self._transport.get_returncode() or 0)
        self._transport.close()


def _check_program(name: str, env: Mapping[str, str], cwd: Path) -> None:
    """Raise the error of a program that does not exist or may not be run. A shell would make it an exit code."""
    error: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    for directory in [""] if "/" in name else os.get_exec_path(env):
        path = cwd / directory / name
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISREG(mode) and os.access(path, os.X_OK):
            return
        error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
    raise error


@cache
def _find_capabilities() -> Capabilities:
    available, reasons = find_limit_capabilities()
    reasons[Capability.IMAGES] = "it runs the programs of this machine; use the runtime 'container'"
    reasons[Capability.DISK_LIMIT] = "its files are on the machine's disk; use the runtime 'sandbox'"
    for capability in (Capability.ISOLATION, Capability.PRIVATE_NETWORK):
        reasons[capability] = "its programs are not isolated; use the runtime 'sandbox' or 'container'"
    return Capabilities(available | {Capability.GATEWAY}, reasons)


def _iter_leftover_directories(parent: Path) -> Iterator[Leftover]:
    for directory in parent.glob(f"{DIRECTORY_PREFIX}*"):
        owner_name = directory.name.removeprefix(DIRECTORY_PREFIX)
        marker = owner_name.rpartition("-")[2]
        if MARKER_PATTERN.fullmatch(marker) and _is_own_directory(directory) and not is_owner_alive(owner_name):
            yield Leftover(f"directory {directory}", partial(_remove_leftover_directory, directory, marker))


def _remove_leftover_directory(directory: Path, marker: str) -> None:
    kill_marked_processes(marker)
    _remove_directory(directory)


def _is_own_directory(path: Path) -> bool:
    """Return whether a path is a directory of this user; in a shared directory, anybody can create a name or a link."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


async def _write_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that writes files in a thread. Raises SandboxError if the machine lacks resources."""
    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    except OSError as error:
        if error.errno in RESOURCE_ERRNOS:
            raise SandboxError(f"{error.filename} cannot be written: {error.strerror}") from error
        raise


def _remove_directory(directory: Path) -> None:
    """Remove the directory, even if it is nested too deep for Python or has directories without permissions."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        run_program(["/bin/sh", "-c", 'chmod -R u+rwX "$0"; rm -rf "$0"', str(directory)], timeout=REMOVE_TIMEOUT)
    if directory.exists():
        raise SandboxError(f"the work directory {directory} cannot be removed")
