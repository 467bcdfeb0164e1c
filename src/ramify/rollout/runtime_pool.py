"""Runtimes that are prepared before a rollout needs them, so that rollouts do not wait for a box to start.

    take -> a prepared runtime if there is one, else a new one; the pool prepares another in the background

A runtime serves one rollout and is never returned. If preparing fails, the rollout that comes next prepares its own
runtime and reports the failure.
"""

import asyncio
import contextlib
from collections.abc import Callable

from ramify.env import Runtime
from ramify.errors import RamifyError


class RuntimePool:
    """Holds up to `size` prepared runtimes from the first `take` to `close`."""

    def __init__(self, make_runtime: Callable[[], Runtime], size: int) -> None:
        self._make_runtime, self._size = make_runtime, size
        self._prepared: list[Runtime] = []
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
        """Stop the prepared runtimes."""
        self._size = 0
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        prepared, self._prepared = self._prepared, []
        await asyncio.gather(*(runtime.stop() for runtime in prepared), return_exceptions=True)

    async def _prepare_one(self) -> None:
        runtime = self._make_runtime()
        try:
            await runtime.prepare()
        except RamifyError:
            with contextlib.suppress(RamifyError):
                await runtime.stop()
            return
        except asyncio.CancelledError:
            await runtime.stop()
            raise
        self._prepared.append(runtime)
