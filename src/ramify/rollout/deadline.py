"""The time limit of an agent, which stands still while the agent waits for an engine that makes no progress.

Whether the engine makes progress is only known afterwards, when its counter was read again. So while the agent waits
for the engine, its time is over only when a later sign of progress confirms that the time was really used:

    time limit --------> over by the wall clock --------> progress is seen: RolloutDeadline, unless that was a stall
                                                   \\----> no progress for `stall_limit` seconds: EngineStalled
"""

import asyncio
import time
from types import TracebackType

from ramify.client.stall import StallClock
from ramify.errors import EngineStalled, RamifyError, RolloutDeadline

RECHECK = 0.1  # seconds between two looks once the wall clock is over the limit


class HarnessDeadline:
    """Ends its block with RolloutDeadline after `limit` seconds besides stalls, or EngineStalled after too many.

    A TimeoutError of the block's own passes unchanged.
    """

    def __init__(self, limit: float, stalls: StallClock, stall_limit: float) -> None:
        self._limit, self._stalls, self._stall_limit = limit, stalls, stall_limit
        self._scope = asyncio.timeout(None)
        self._start = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._failure: RamifyError | None = None

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._start = time.monotonic()
        self._check()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            assert self._failure is not None
            raise self._failure from late

    def _check(self) -> None:
        """End the block if its time is over, or look again when it may be."""
        stalled, loop = self._stalls.seconds, asyncio.get_running_loop()
        if stalled >= self._stall_limit:
            self._failure = EngineStalled(
                f"the engine made no progress for {stalled:.1f} s while the agent waited for it; "
                f"timeouts.engine_stall allows {self._stall_limit:g} s: look at the engine's process and log"
            )
        elif self._stalls.confirmed - self._start - self._stalls.ended >= self._limit:
            uncounted = f", without {stalled:.1f} s in which the engine made no progress" if stalled else ""
            self._failure = RolloutDeadline(f"harness took longer than {self._limit:g} s{uncounted}")
        if self._failure is not None:
            self._scope.reschedule(loop.time())
            return
        left = min(self._start + self._stalls.ended + self._limit - time.monotonic(), self._stall_limit - stalled)
        self._timer = loop.call_later(left if left > 0 else RECHECK, self._check)
