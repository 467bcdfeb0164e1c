"""Limits how many waiting tasks continue in one iteration of the event loop.

When hundreds of responses arrive together, all tasks that wait for them continue in the same iteration of the loop.
Until it ends, no timer fires and no heartbeat is sent. With a pacer, one task continues per iteration.
"""

import asyncio
from collections import deque


class LoopPacer:
    """Lets one task continue in each iteration of the event loop, in order."""

    __slots__ = ("_active_loop", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._active_loop: asyncio.AbstractEventLoop | None = None  # the loop in which `_release_next` is scheduled

    async def wait_turn(self) -> None:
        """Wait for this task's turn; return at once if no other task had one in this iteration."""
        loop = asyncio.get_running_loop()
        if self._active_loop is not loop:  # idle, or left over from a loop that has ended
            self._active_loop = loop
            self._waiting.clear()
            loop.call_soon(self._release_next)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _release_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # done if its task was cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._release_next)
                return
        self._active_loop = None
