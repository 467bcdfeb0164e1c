"""Return the memory of large rollouts to the operating system.

A long trace consists of many buffers of a few kilobytes, which glibc allocates on its heap. When they are freed, glibc
returns only memory at the top of the heap, so a worker that has run one large rollout would keep its memory forever.
"""

import asyncio
import ctypes
from collections.abc import Callable

from ramify.core.async_calls import cancel_all

LARGE_ROLLOUT_BYTES = 4 << 20  # size of an encoded rollout from which the heap is trimmed
TRIM_DELAY = 1.0  # seconds: the response has to be sent first, and several rollouts may end together


def find_malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`, or None if the C library has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class HeapTrimmer:
    """Trims the heap of this process soon after a large rollout. `num_trims` counts the trims."""

    def __init__(self, *, delay: float = TRIM_DELAY) -> None:
        self._malloc_trim, self._delay = find_malloc_trim(), delay
        self._trim_task: asyncio.Task[None] | None = None
        self.num_trims = 0

    def on_rollout_end(self, size: int) -> None:
        """Schedule a trim if the rollout, `size` bytes when encoded, was large."""
        if self._malloc_trim is not None and size >= LARGE_ROLLOUT_BYTES and self._trim_task is None:
            self._trim_task = asyncio.create_task(self._trim_later(self._malloc_trim), name="heap trimmer")

    async def close(self) -> None:
        """Cancel a scheduled trim."""
        if self._trim_task is not None:
            await cancel_all([self._trim_task])

    async def _trim_later(self, trim: Callable[[int], int]) -> None:
        await asyncio.sleep(self._delay)
        self._trim_task = None  # a rollout that ends meanwhile schedules the next trim
        await asyncio.to_thread(trim, 0)
        self.num_trims += 1
