"""The runtime of a rollout: prepared ahead, retried, and what is run in it and copied out of it around the agent.

    take -> a prepared runtime if there is one, else a new one; the pool prepares another in the background

A runtime serves one rollout and is never returned. If preparing fails, the rollout that comes next prepares its own
runtime and reports the failure.
"""

import asyncio
import functools
import logging
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from ramify.core.async_calls import cancel_all, retry
from ramify.core.errors import AgentFailed, EnvironmentFault
from ramify.core.terminal import format_event
from ramify.env import Runtime, Task
from ramify.env.runtime import Capabilities

MAX_COMMAND_OUTPUT_CHARS = 1000  # of a setup or pre-run command, in the log and in an error; the end of the output
MAX_RETRIES = 3
INITIAL_BACKOFF = 0.1  # seconds before the first retry, doubled for each further one
M = TypeVar("M", bound=Callable[..., Coroutine[Any, Any, Any]])
_logger = logging.getLogger("ramify.runtimes")


async def collect_outputs(runtime: Runtime, outputs: Sequence[str], target: Path) -> dict[str, str]:
    """Copy the outputs from the agent's runtime into `target`; return those that are missing, with the reason.

    What an agent did not write, made too large or replaced by a link is missing: it is the agent's result.
    """
    missing: dict[str, str] = {}
    for path in outputs:
        try:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            await runtime.download(path, target / path)
        except (AgentFailed, OSError, ValueError) as error:
            missing[path] = f"{type(error).__name__}: {error}"
            _remove_incomplete_copy(target / path)
    return missing


def _remove_incomplete_copy(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


async def run_commands(runtime: Runtime, key: str, commands: Sequence[str], *, timeout: float, rollout_id: str) -> None:
    """Run command lines one after the other, and log the output of each.

    Raises EnvironmentFault if one fails or takes `timeout` seconds.

    - `key`: the key that has the commands, such as `task.setup`.
    """
    for index, command in enumerate(commands):
        start = time.monotonic()
        result = await runtime.run(command, timeout=timeout)
        output = (result.stdout + result.stderr).decode("utf-8", "replace").strip()[-MAX_COMMAND_OUTPUT_CHARS:]
        fields = {"id": rollout_id, "key": f"{key}[{index}]", "command": command, "exit_code": result.returncode}
        _logger.info(format_event("command ended", **fields, seconds=time.monotonic() - start, output=output))
        if result.timed_out:
            raise EnvironmentFault(f"{key}[{index}] did not end in {timeout:g} s: {command}; raise timeouts.setup")
        if result.returncode:
            advice = f"correct {key}, or add what the command needs to the image or to the commands before it"
            raise EnvironmentFault(f"{key}[{index}] exited with {result.returncode}: {command}; {advice}\n{output}")


def _with_retries(method: M) -> M:
    """Return a method that calls the method of the inner runtime, with retries."""

    @functools.wraps(method, updated=())  # so that it is not abstract
    async def call(self: "RetryingRuntime", *args: Any, **kwargs: Any) -> Any:
        inner_method = getattr(self.inner, method.__name__)
        return await retry(lambda: inner_method(*args, **kwargs), max_retries=MAX_RETRIES, backoff=INITIAL_BACKOFF)

    return cast(M, call)


class RetryingRuntime(Runtime):
    """Wraps a runtime and retries each call after a retryable error, such as a moment without free processes."""

    def __init__(self, inner: Runtime) -> None:
        super().__init__(inner.config)
        self.inner = inner

    @property
    def workdir(self) -> Path:
        """The work directory of the inner runtime."""
        return self.inner.workdir

    @property
    def trace_metadata(self) -> dict[str, Any]:
        """The description of the inner runtime."""
        return self.inner.trace_metadata

    @property
    def kept_workdir(self) -> Path | None:
        """Where the inner runtime kept its files."""
        return self.inner.kept_workdir

    @property
    def capabilities(self) -> Capabilities:
        """What the inner runtime enforces."""
        return self.inner.capabilities

    def check_task(self, task: Task) -> None:
        """Check the task with the inner runtime."""
        self.inner.check_task(task)

    prepare = _with_retries(Runtime.prepare)
    start = _with_retries(Runtime.start)
    stop = _with_retries(Runtime.stop)
    spawn = _with_retries(Runtime.spawn)
    spawn_agent = _with_retries(Runtime.spawn_agent)
    read = _with_retries(Runtime.read)
    write = _with_retries(Runtime.write)
    upload = _with_retries(Runtime.upload)
    download = _with_retries(Runtime.download)
    expose = _with_retries(Runtime.expose)


class PreparedRuntimes:
    """Holds up to `size` prepared runtimes from the first `take` to `close`."""

    def __init__(self, make_runtime: Callable[[], Runtime], size: int) -> None:
        self._make_runtime, self._size = make_runtime, size
        self._prepared: list[Runtime] = []
        self._unstopped: list[Runtime] = []  # could not be stopped; `close` tries again
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self) -> Runtime:
        """Return a runtime that is not started yet, prepared if possible."""
        runtime = self._prepared.pop(0) if self._prepared else self._make_runtime()
        for _ in range(self._size - len(self._prepared) - len(self._tasks)):
            task = asyncio.create_task(self._prepare_one(), name="prepare a runtime")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return runtime

    async def close(self) -> None:
        """Stop the prepared runtimes. What cannot be stopped is logged."""
        self._size = 0
        await cancel_all(self._tasks)
        runtimes = [*self._prepared, *self._unstopped]
        self._prepared, self._unstopped = [], []
        await asyncio.gather(*(self._stop(runtime) for runtime in runtimes))

    async def _prepare_one(self) -> None:
        runtime = self._make_runtime()
        try:
            await runtime.prepare()
        except Exception:  # noqa: BLE001 - a runtime may be a user's plugin
            await self._stop(runtime)
            return
        except asyncio.CancelledError:
            await self._stop(runtime)
            raise
        self._prepared.append(runtime)

    async def _stop(self, runtime: Runtime) -> None:
        try:
            await runtime.stop()
        except Exception as error:  # noqa: BLE001 - a runtime may be a user's plugin
            self._unstopped.append(runtime)
            _logger.warning("a prepared runtime could not be stopped: %s: %s", type(error).__name__, error)
