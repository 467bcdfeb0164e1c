"""A turnstile: one at a time, so that the event loop comes round in between.

When a few hundred answers arrive together, everyone who waited goes on in the same round of the loop, and as long as
that round lasts nothing else happens: no timer fires, no heartbeat is sent. Behind a turnstile one goes on per round.
"""

import asyncio
from collections import deque


class LoopPacer:
    """Lets one task through in each round of its loop."""

    __slots__ = ("_turning", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning: asyncio.AbstractEventLoop | None = None  # a loop that has ended turns nothing any more

    async def wait_turn(self) -> None:
        """Wait for one's turn; at once if nobody else has had it in this round."""
        loop = asyncio.get_running_loop()
        if self._turning is not loop:
            self._turning = loop
            self._waiting.clear()
            loop.call_soon(self._release_next)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _release_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # a task that was cancelled has left the queue
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._release_next)
                return
        self._turning = None
