"""Gives memory that large rollouts have used back to the system.

A long trace is many buffers of a few kilobytes, which glibc takes from its heap. It keeps what lies below the newest of
them when they are freed, so a worker that has run one large rollout would hold its memory for ever.
"""

import asyncio
import ctypes
from collections.abc import Callable

LARGE = 4 << 20  # bytes of an encoded rollout from which its memory is worth giving back
PAUSE = 1.0  # seconds until it is done: the answer has to be sent first, and several rollouts may end together


def find_malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; None where the C library is another one."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class HeapTrimmer:
    """Trims the heap of this process soon after a large rollout; `count` says how often it did."""

    def __init__(self, *, pause: float = PAUSE) -> None:
        self._trim, self._pause = find_malloc_trim(), pause
        self._pending: asyncio.Task[None] | None = None
        self.count = 0

    def rollout_ended(self, size: int) -> None:
        """Plan a trim if the rollout, `size` bytes when encoded, was large."""
        if self._trim is not None and size >= LARGE and self._pending is None:
            self._pending = asyncio.create_task(self._trim_later(self._trim), name="heap trimmer")

    async def close(self) -> None:
        """Take back a trim that was planned."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    async def _trim_later(self, trim: Callable[[int], int]) -> None:
        await asyncio.sleep(self._pause)
        self._pending = None  # a rollout that ends meanwhile plans the next one
        await asyncio.to_thread(trim, 0)
        self.count += 1
