"""The interface of runtimes. A runtime runs the programs of one rollout; `stop` removes everything.

    start -> run, spawn, read, write ... -> stop

A command that fails, times out or does not exist is a normal result (`ExecResult`), since the agent may have written
it. Only a failure of the runtime itself raises `SandboxError`, which is retried.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, ClassVar

from pydantic import Field

from ramify.config import Config
from ramify.env.task import Task

TIMEOUT_EXIT_CODE = 124  # as of `timeout(1)`
NOT_EXECUTABLE_EXIT_CODE = 126  # as of a shell
NOT_FOUND_EXIT_CODE = 127

CommandLine = Sequence[str] | str
"""A program and its arguments, or a line for `sh -c`."""


class RuntimeConfig(Config):
    """Configuration common to all runtimes.

    - `id`: the id that selects the runtime.
    - `keep_workdir`: whether the files of a rollout are kept after it ends, for inspection.
    - `max_output_bytes`: bytes kept of a command's standard output, and of its standard error: the first and the last
      half.
    - `env`: environment variables for every program.
    """

    renamed_keys: ClassVar = {"keep": "keep_workdir", "max_output": "max_output_bytes"}

    id: str = "local"
    keep_workdir: bool = False
    max_output_bytes: int = Field(default=1 << 20, ge=0)
    env: dict[str, str] = {}


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


class RuntimeProcess(ABC):
    """A running program and all processes it started."""

    pid: int

    @abstractmethod
    async def wait(self, timeout: float) -> ExecResult:
        """Wait until the program exits and return the result. After `timeout` seconds, kill it and all it started."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill the program and all it started; return when they are gone."""


class Runtime(ABC):
    """Base class of runtimes: where the programs of one rollout run, and its files.

    - `config`: the options of the runtime.
    """

    config: RuntimeConfig

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def workdir(self) -> Path:
        """The directory in which programs start and that relative paths refer to."""

    @property
    def trace_metadata(self) -> dict[str, Any]:
        """The description of the runtime that is stored in a trace."""
        return self.config.model_dump(mode="json", include={"id"})

    @abstractmethod
    def check_task(self, task: Task) -> None:
        """Raise ConfigInvalid if the task needs something that this runtime does not support."""

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
    ) -> RuntimeProcess:
        """Start a program and return without waiting for it.

        Raises FileNotFoundError or another OSError if it cannot be run, ValueError if the command line is invalid.
        """

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
            await process.kill()
            raise

    @abstractmethod
    async def read(self, path: str | PurePath) -> bytes:
        """Return the content of a file. Raises FileNotFoundError if there is none."""

    @abstractmethod
    async def write(self, path: str | PurePath, data: bytes | str) -> None:
        """Write a file, and create its parent directories."""
