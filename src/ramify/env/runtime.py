"""The interface of runtimes. A runtime runs the programs of one rollout; `stop` removes everything.

    prepare -> start -> run, spawn, read, write, upload, download, expose ... -> stop

A command that fails, times out or does not exist is a normal result (`ExecResult`), since the agent may have written
it. A failure of the runtime itself raises `SandboxError`, which is retried, also if something outside has killed the
sandbox. If a program ends its own sandbox, for example by using too much memory, later calls raise `AgentFailed`, which
is the agent's fault.

What a runtime enforces depends on its kind and on the machine. `capabilities` states it, and `check_task` refuses a
configuration or a task that asks for more: a limit is enforced or refused, never ignored.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from pydantic import Field

from ramify.core.config import Config
from ramify.core.errors import ConfigInvalid, RamifyError
from ramify.core.names import find_similar
from ramify.env.task import Task

TIMEOUT_EXIT_CODE = 124  # as `timeout(1)` returns
NOT_EXECUTABLE_EXIT_CODE = 126  # as a shell returns
NOT_FOUND_EXIT_CODE = 127

CommandLine = Sequence[str] | str
"""A program and its arguments, or a line for `sh -c`."""


class Capability(StrEnum):
    """Something that a runtime enforces or supports.

    - `ISOLATION`: programs cannot reach files, processes and sockets of the machine.
    - `PRIVATE_NETWORK`: programs reach nothing over the network but the gateway of their rollout.
    - `MEMORY_LIMIT`, `PROCESS_LIMIT`, `DISK_LIMIT`, `CPU_LIMIT`: the resource of the same name is limited.
    - `IMAGES`: a task may name a container image.
    - `GATEWAY`: programs can reach the gateway of their rollout.
    """

    ISOLATION = "isolation"
    PRIVATE_NETWORK = "private_network"
    MEMORY_LIMIT = "memory_limit"
    PROCESS_LIMIT = "process_limit"
    DISK_LIMIT = "disk_limit"
    CPU_LIMIT = "cpu_limit"
    IMAGES = "images"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime enforces or supports on this machine, and why it does not have the other capabilities."""

    available: frozenset[Capability] = frozenset()
    reasons: Mapping[Capability, str] = field(default_factory=dict[Capability, str])

    def check(self, capability: Capability, requirement: str, runtime_id: str) -> None:
        """Raise ConfigInvalid if a capability is missing. `requirement` names what asks for it."""
        if capability not in self.available:
            reason = self.reasons.get(capability, "this kind of runtime does not have it")
            raise ConfigInvalid(f"{requirement} needs {capability} of the runtime {runtime_id!r}: {reason}")


class ResourceLimits(Config):
    """Limits on the programs of one rollout together. None: no limit."""

    memory_mb: int | None = Field(default=None, ge=1)
    """Mebibytes of memory; files in memory count. A program that exceeds it is killed."""
    max_processes: int | None = Field(default=None, ge=1)
    """Processes and threads."""
    disk_mb: int | None = Field(default=None, ge=1)
    """Mebibytes of files."""
    cpus: float | None = Field(default=None, gt=0)
    """Cores."""


CAPABILITY_OF_LIMIT = {
    "memory_mb": Capability.MEMORY_LIMIT,
    "max_processes": Capability.PROCESS_LIMIT,
    "disk_mb": Capability.DISK_LIMIT,
    "cpus": Capability.CPU_LIMIT,
}


class RuntimeConfig(Config):
    """Configuration common to all runtimes.

    - `id`: the id that selects the runtime.
    - `keep_workdir`: whether the files of a rollout are kept after it ends, for inspection.
    - `max_output_bytes`: bytes kept of a command's standard output, and of its standard error: the first and the last
      half.
    - `max_file_mb`: mebibytes of the largest file, and of the largest directory, that is read out of the runtime.
    - `env`: environment variables for every program.
    - `limits`: resources of one rollout; `task.resources` overrides them.
    - `num_prepared`: runtimes that are prepared before a rollout needs them. 0: none.
    - `setup`: shell command lines that prepare both runtimes of a rollout, after the commands of `task.setup`.
    - `pre_run`: shell command lines that run right before the agent starts, in its runtime only.
    """

    id: str = "local"
    keep_workdir: bool = False
    max_output_bytes: int = Field(default=1 << 20, ge=0)
    max_file_mb: float = Field(default=64.0, gt=0)
    env: dict[str, str] = {}
    limits: ResourceLimits = ResourceLimits()
    num_prepared: int = Field(default=0, ge=0)
    setup: list[str] = []
    pre_run: list[str] = []


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command. `returncode` is -n if signal n killed it, and 124 if it timed out."""

    returncode: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False

    @property
    def text(self) -> str:
        """Standard output as text, with invalid bytes replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """Standard error as text, with invalid bytes replaced."""
        return self.stderr.decode("utf-8", "replace")


def build_argv(command: CommandLine) -> list[str]:
    """Return a program and its arguments; a text is a line for `sh -c`. Raises ValueError if there is no program."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not argv:
        raise ValueError("the command line is empty")
    return argv


class RuntimeProcess(ABC):
    """A running program and all processes it started. `pid` is its id inside the runtime."""

    pid: int

    @abstractmethod
    async def wait(self, timeout: float) -> ExecResult:
        """Wait until the program exits and return the result. After `timeout` seconds, kill it and all it started."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill the program and all it started; return when they are gone."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to the standard input of an interactive program. Raises BrokenPipeError if it no longer reads."""

    @abstractmethod
    async def read_line(self, timeout: float) -> bytes:
        """Return the next line that an interactive program wrote, b"" at the end of its output.

        Raises TimeoutError if no line is complete after `timeout` seconds, ValueError if it is longer than
        `max_output_bytes`.
        """


class Runtime(ABC):
    """Base class of runtimes: where the programs of one rollout run, and its files.

    - `config`: the options of the runtime.
    """

    config: RuntimeConfig
    _kept_workdir: Path | None = None  # `stop` sets it

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def workdir(self) -> Path:
        """The directory in which programs start and that relative paths refer to, as programs see it."""

    @property
    def trace_metadata(self) -> dict[str, Any]:
        """The description of the runtime that is stored in a trace."""
        return self.config.model_dump(mode="json", include={"id"})

    @property
    def kept_workdir(self) -> Path | None:
        """The directory of this machine that has the files of the work directory after `stop`; None if none has.

        There is one if `config.keep_workdir` is set.
        """
        return self._kept_workdir

    @property
    def capabilities(self) -> Capabilities:
        """What this runtime enforces or supports on this machine."""
        return Capabilities()

    def get_limits(self, task: Task) -> ResourceLimits:
        """Return the limits of the configuration, overridden by the task's limits.

        Raises ConfigInvalid for an unknown resource or a value that is not positive.
        """
        for name in task.resources:
            if name not in CAPABILITY_OF_LIMIT:
                similar = find_similar(name, CAPABILITY_OF_LIMIT)
                hint = f"; did you mean {similar}?" if similar else ""
                known = ", ".join(CAPABILITY_OF_LIMIT)
                raise ConfigInvalid(f"task {task.identity}: resources.{name} is unknown, expected {known}{hint}")
        limits = self.config.limits
        return ResourceLimits.model_validate(limits.model_dump() | task.resources) if task.resources else limits

    def check_task(self, task: Task) -> None:
        """Raise ConfigInvalid if the configuration or the task needs a capability that is missing here."""
        capabilities, runtime_id = self.capabilities, self.config.id
        if task.image is not None:
            capabilities.check(Capability.IMAGES, f"the task's image {task.image!r}", runtime_id)
        for name in task.requires:
            capabilities.check(Capability(name), f"task {task.identity}", runtime_id)
        limits = self.get_limits(task)
        for name, capability in CAPABILITY_OF_LIMIT.items():
            if getattr(limits, name) is not None:
                origin = 'runtime.limits ("None": no limit)'
                if name in task.resources:
                    source_key = task.resource_source_keys.get(name)
                    origin = f"the task's resources{f' ({source_key})' if source_key else ''}"
                capabilities.check(capability, f"{name} in {origin}", runtime_id)

    async def prepare(self) -> None:
        """Do the part of `start` that does not depend on the task. `PreparedRuntimes` calls it ahead of time."""
        return

    @abstractmethod
    async def start(self, task: Task) -> None:
        """Prepare the runtime for a task."""

    @abstractmethod
    async def stop(self) -> None:
        """Kill all programs and remove all files, unless `config.keep_workdir` is set. May be called more than once."""

    @abstractmethod
    async def spawn(
        self,
        command: CommandLine,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | PurePath | None = None,
        stdin: bytes | None = None,
        interactive: bool = False,
    ) -> RuntimeProcess:
        """Start a program and return without waiting for it.

        Standard input is `stdin` and then the end of the file; an `interactive` program reads what `write` sends, and
        `read_line` returns its output. Raises FileNotFoundError or another OSError if it cannot be run, ValueError if
        the command line is invalid.
        """

    async def spawn_agent(
        self, command: CommandLine, *, env: Mapping[str, str] | None = None, stdin: bytes | None = None
    ) -> RuntimeProcess:
        """Start the agent's program, as `spawn` does. A runtime may have prepared this program before the task."""
        return await self.spawn(command, env=env, stdin=stdin)

    async def run(
        self,
        command: CommandLine,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | PurePath | None = None,
        stdin: bytes | None = None,
        timeout: float,
    ) -> ExecResult:
        """Run a program until it exits, or for at most `timeout` seconds. Cancelling this call kills the program."""
        try:
            process = await self.spawn(command, env=env, cwd=cwd, stdin=stdin)
        except FileNotFoundError as error:
            return ExecResult(NOT_FOUND_EXIT_CODE, stderr=f"not found: {error.filename}".encode())
        except OSError as error:  # no permission, not a program, arguments too long
            return ExecResult(
                NOT_EXECUTABLE_EXIT_CODE, stderr=f"cannot be run: {error.filename}: {error.strerror}".encode()
            )
        except ValueError as error:  # a null byte or an invalid character
            return ExecResult(NOT_EXECUTABLE_EXIT_CODE, stderr=f"cannot be run: {error}".encode())
        try:
            return await process.wait(timeout)
        except BaseException:
            with contextlib.suppress(RamifyError):  # a cancellation stays one; `stop` tries again
                await process.kill()
            raise

    @abstractmethod
    async def read(self, path: str | PurePath) -> bytes:
        """Return the content of a regular file beneath the root of the runtime.

        Raises FileNotFoundError if there is none, ValueError if it is larger than `config.max_file_mb`.
        """

    @abstractmethod
    async def write(self, path: str | PurePath, data: bytes | str) -> None:
        """Write a file, and create its parent directories."""

    @abstractmethod
    async def upload(self, source: Path, target: str | PurePath) -> None:
        """Copy the regular files of a directory of this machine into a directory of the runtime."""

    @abstractmethod
    async def download(self, source: str | PurePath, target: Path) -> None:
        """Copy a regular file, or the regular files of a directory, of the runtime to a path of this machine.

        Permissions are kept, links and special files left out. Raises FileNotFoundError if there is no such file or
        directory, ValueError if the files are larger than `config.max_file_mb`.
        """

    @abstractmethod
    async def expose(self, base_url: str) -> str:
        """Make a URL of this machine reachable for programs of the runtime; return the URL that they use."""

    @classmethod
    def clean(cls, config: RuntimeConfig) -> Iterable[str]:
        """Remove what runtimes of processes that have ended left behind; yield one line for each thing removed.

        Raises SandboxError at the end if something could not be removed.
        """
        return ()
