"""A runtime wrapper that retries failed calls.

Each call is retried separately if its error is retryable, so that one moment without free processes does not cost a
rollout of an hour.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar

from ramify.core.async_calls import retry
from ramify.env import Runtime, RuntimeProcess, Task
from ramify.env.runtime import Capabilities, CommandLine

T = TypeVar("T")
MAX_RETRIES = 3
INITIAL_BACKOFF = 0.1  # seconds before the first retry, doubled for each further one


class RetryingRuntime(Runtime):
    """Wraps a runtime and retries its calls after retryable errors."""

    def __init__(self, inner: Runtime) -> None:
        super().__init__(inner.config)
        self._inner = inner

    @property
    def workdir(self) -> Path:
        """The work directory of the inner runtime."""
        return self._inner.workdir

    @property
    def trace_metadata(self) -> dict[str, Any]:
        """The description of the inner runtime."""
        return self._inner.trace_metadata

    @property
    def kept_workdir(self) -> Path | None:
        """Where the inner runtime kept its files."""
        return self._inner.kept_workdir

    @property
    def capabilities(self) -> Capabilities:
        """What the inner runtime enforces."""
        return self._inner.capabilities

    def check_task(self, task: Task) -> None:
        """Check the task with the inner runtime."""
        self._inner.check_task(task)

    async def prepare(self) -> None:
        """Prepare the inner runtime, with retries."""
        await self._with_retries(self._inner.prepare)

    async def start(self, task: Task) -> None:
        """Start the inner runtime, with retries."""
        await self._with_retries(lambda: self._inner.start(task))

    async def stop(self) -> None:
        """Stop the inner runtime, with retries."""
        await self._with_retries(self._inner.stop)

    async def spawn(
        self,
        command: CommandLine,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | PurePath | None = None,
        stdin: bytes | None = None,
        interactive: bool = False,
    ) -> RuntimeProcess:
        """Start a program in the inner runtime, with retries."""
        return await self._with_retries(
            lambda: self._inner.spawn(command, env=env, cwd=cwd, stdin=stdin, interactive=interactive)
        )

    async def read(self, path: str | PurePath) -> bytes:
        """Read a file in the inner runtime, with retries."""
        return await self._with_retries(lambda: self._inner.read(path))

    async def write(self, path: str | PurePath, data: bytes | str) -> None:
        """Write a file in the inner runtime, with retries."""
        await self._with_retries(lambda: self._inner.write(path, data))

    async def upload(self, source: Path, target: str | PurePath) -> None:
        """Copy a directory into the inner runtime, with retries."""
        await self._with_retries(lambda: self._inner.upload(source, target))

    async def download(self, source: str | PurePath, target: Path) -> None:
        """Copy a file or a directory out of the inner runtime, with retries."""
        await self._with_retries(lambda: self._inner.download(source, target))

    async def expose(self, base_url: str) -> str:
        """Make a URL reachable in the inner runtime, with retries."""
        return await self._with_retries(lambda: self._inner.expose(base_url))

    async def _with_retries(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retry(call, max_retries=MAX_RETRIES, backoff=INITIAL_BACKOFF)
