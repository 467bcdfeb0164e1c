"""How long an event loop has not turned, seen from another thread, and what it is doing instead."""

import asyncio
import sys
import threading
import time
import traceback

TICK_INTERVAL = 0.1
MAX_STACK_FRAMES = 25
LAG_REPORT_THRESHOLD = 1.0  # seconds of lag from which a beat says what the loop is doing


class LoopMonitor:
    """Ticks in the loop that makes it; read from anywhere."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread_id = threading.get_ident()
        self._last_tick = time.monotonic()
        self.max_lag = 0.0
        """The longest the loop was seen to lag."""
        self._handle = self._loop.call_later(TICK_INTERVAL, self._tick)

    def _tick(self) -> None:
        self.max_lag = max(self.max_lag, self._current_lag)
        self._last_tick = time.monotonic()
        self._handle = self._loop.call_later(TICK_INTERVAL, self._tick)

    def stop(self) -> None:
        """No more ticks."""
        self._handle.cancel()

    @property
    def lag(self) -> float:
        """Seconds the loop is late; none where it is the loop that asks, for then it turns."""
        return 0.0 if threading.get_ident() == self._loop_thread_id else self._current_lag

    @property
    def _current_lag(self) -> float:
        return max(0.0, time.monotonic() - self._last_tick - TICK_INTERVAL)

    def inspect_running_task(self) -> tuple[str, str]:
        """The name of the task that the loop is running, and its stack."""
        frame = sys._current_frames().get(self._loop_thread_id)
        stack = "".join(traceback.format_stack(frame, limit=MAX_STACK_FRAMES)) if frame is not None else ""
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:
            task = None
        return (task.get_name() if task is not None else ""), stack
