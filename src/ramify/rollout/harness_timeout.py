r"""The timeout of an agent, which does not count the time that the agent waits for a stalled engine.

Whether the engine makes progress is only known later, when its step counter is read again. So if the timeout passes
while the agent waits for the engine, the outcome depends on what is seen next:

    timeout passes on the wall clock ----> progress, and no stall before it: BudgetExceeded
                                     `---> progress after a stall: the agent gets the time of the stall back
                                     `---> stalls reach `stall_timeout` seconds: ProviderError
"""

import asyncio
import time
from types import TracebackType

from ramify.core.errors import BudgetExceeded, ProviderError, RamifyError
from ramify.infer.client.stall_clock import StallClock

RECHECK_INTERVAL = 0.1  # seconds between two checks after the timeout has passed on the wall clock


class HarnessTimeout:
    """Raises BudgetExceeded after `timeout` seconds without stalls, ProviderError after `stall_timeout` seconds of
    stalls.

    Stalls before the block do not count. A TimeoutError that the block raises itself passes unchanged.
    """

    def __init__(self, timeout: float, stall_clock: StallClock, stall_timeout: float) -> None:
        self._timeout, self._stall_clock, self._stall_timeout = timeout, stall_clock, stall_timeout
        self._scope = asyncio.timeout(None)
        self._started_at = 0.0
        self._stalled_before = 0.0  # seconds
        self._timer: asyncio.TimerHandle | None = None
        self._failure: RamifyError | None = None

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._started_at, self._stalled_before = time.monotonic(), self._stall_clock.seconds
        self._check()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as timeout_error:
            assert self._failure is not None
            raise self._failure from timeout_error

    def _check(self) -> None:
        """End the block if its time is over; otherwise schedule the next check for the earliest time it could be."""
        loop = asyncio.get_running_loop()
        stalled = self._stall_clock.seconds - self._stalled_before
        deadline = self._started_at + self._timeout + self._stall_clock.ended_seconds - self._stalled_before
        if stalled >= self._stall_timeout:
            self._failure = ProviderError(
                f"the engine made no progress for {stalled:.1f} s while the agent waited for it; "
                f"timeouts.engine_stall allows {self._stall_timeout:g} s: look at the engine's process and log"
            )
        elif self._stall_clock.known_until >= deadline:
            uncounted = f", without {stalled:.1f} s in which the engine made no progress" if stalled else ""
            self._failure = BudgetExceeded(f"harness took longer than {self._timeout:g} s{uncounted}")
        if self._failure is not None:
            self._scope.reschedule(loop.time())
            return
        delay = min(deadline - time.monotonic(), self._stall_timeout - stalled)
        self._timer = loop.call_later(delay if delay > 0 else RECHECK_INTERVAL, self._check)
