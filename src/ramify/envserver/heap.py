"""Returns memory that large rollouts have used to the system.

A long trace consists of many buffers of a few kilobytes, which glibc allocates on its heap. When they are freed, glibc
returns only memory at the top of the heap, so a worker that has run one large rollout would keep its memory for ever.
"""

import asyncio
import ctypes
from collections.abc import Callable

LARGE_ROLLOUT = 4 << 20  # bytes of an encoded rollout from which on the heap is trimmed
TRIM_DELAY = 1.0  # seconds until then: the answer has to be sent first, and several rollouts may end together


def find_malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; None where the C library is another one."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class HeapTrimmer:
    """Trims the heap of this process soon after a large rollout; `count` says how often it did."""

    def __init__(self, *, delay: float = TRIM_DELAY) -> None:
        self._trim, self._delay = find_malloc_trim(), delay
        self._pending: asyncio.Task[None] | None = None
        self.count = 0

    def rollout_ended(self, size: int) -> None:
        """Schedule a trim if the rollout, `size` bytes when encoded, was large."""
        if self._trim is not None and size >= LARGE_ROLLOUT and self._pending is None:
            self._pending = asyncio.create_task(self._trim_later(self._trim), name="heap trimmer")

    async def close(self) -> None:
        """Cancel a scheduled trim."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    async def _trim_later(self, trim: Callable[[int], int]) -> None:
        await asyncio.sleep(self._delay)
        self._pending = None  # a rollout that ends meanwhile schedules the next trim
        await asyncio.to_thread(trim, 0)
        self.count += 1
