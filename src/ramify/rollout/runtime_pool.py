"""Runtimes that are prepared before a rollout needs them, so that rollouts do not wait for a box to start.

    take -> a prepared runtime if there is one, else a new one; the pool prepares another in the background

A runtime serves one rollout and is never returned. If preparing fails, the rollout that comes next prepares its own
runtime and reports the failure.
"""

import asyncio
import logging
from collections.abc import Callable

from ramify.env import Runtime

_logger = logging.getLogger("ramify.runtimes")


class RuntimePool:
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
