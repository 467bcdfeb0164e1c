"""What a runtime is: a box in which one rollout's programs run, and nothing of it remains.

    start -> run, spawn, read, write ... -> stop

A command that fails, runs out of time or does not exist is an answer (`Ran`), since the agent may have written it. Only
a box that cannot be made, reached or kept is a failure: `SandboxError`, which is worth another try.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ramify.runtime.config import RuntimeConfig

if TYPE_CHECKING:
    from ramify.env import Task

TIMEOUT_EXIT_CODE = 124  # the code `timeout` exits with
NOT_EXECUTABLE_EXIT_CODE = 126  # ... and a shell
NOT_FOUND_EXIT_CODE = 127

CommandLine = Sequence[str] | str
"""A program and its arguments, or a line for `sh`."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. Killed by signal n it has the code -n; out of time, 124."""

    returncode: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False

    @property
    def text(self) -> str:
        """The output as text; bytes that are none are replaced."""
        return self.stdout.decode("utf-8", "replace")


class RuntimeProcess(ABC):
    """A program that runs in a box, and everything it started."""

    pid: int

    @abstractmethod
    async def wait(self, timeout: float) -> ExecResult:
        """How it ended. After `deadline` seconds it is killed with all it started, and has timed out."""

    @abstractmethod
    async def kill(self) -> None:
        """End it and all it started; returns when they are gone."""


class Runtime(ABC):
    """The box of one rollout."""

    config: RuntimeConfig

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def workdir(self) -> Path:
        """Where programs start and relative paths begin."""

    @property
    def trace_metadata(self) -> dict[str, Any]:
        """What a trace says about the box it was made in."""
        return self.config.model_dump(mode="json", include={"id"})

    @abstractmethod
    def check_task(self, task: "Task") -> None:
        """Refuse a task that asks for what this runtime does not have, with ConfigInvalid."""

    @abstractmethod
    async def start(self, task: "Task") -> None:
        """Make the box."""

    @abstractmethod
    async def stop(self) -> None:
        """End every program in the box and remove it, unless the config says to keep it. May be called again."""

    @abstractmethod
    async def spawn(
        self,
        command: CommandLine,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | PurePath | None = None,
        stdin: bytes | None = None,
    ) -> RuntimeProcess:
        """Start a program and leave it running; raises FileNotFoundError, another OSError or, for a line that no system
        takes, ValueError if it cannot be run."""

    async def run(
        self,
        command: CommandLine,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | PurePath | None = None,
        stdin: bytes | None = None,
        timeout: float,
    ) -> ExecResult:
        """Run a program to its end, or for `deadline` seconds. Whoever cancels this kills it."""
        try:
            process = await self.spawn(command, env=env, cwd=cwd, stdin=stdin)
        except FileNotFoundError as error:
            return ExecResult(NOT_FOUND_EXIT_CODE, stderr=f"not found: {error.filename}".encode())
        except OSError as error:  # no permission, no program, too long
            return ExecResult(
                NOT_EXECUTABLE_EXIT_CODE, stderr=f"cannot be run: {error.filename}: {error.strerror}".encode()
            )
        except ValueError as error:  # a null byte, half a character
            return ExecResult(NOT_EXECUTABLE_EXIT_CODE, stderr=f"cannot be run: {error}".encode())
        try:
            return await process.wait(timeout)
        except BaseException:
            await process.kill()
            raise

    @abstractmethod
    async def read(self, path: str | PurePath) -> bytes:
        """The bytes of a file in the box; FileNotFoundError if there is none."""

    @abstractmethod
    async def write(self, path: str | PurePath, data: bytes | str) -> None:
        """Put a file into the box, with the directories above it."""
