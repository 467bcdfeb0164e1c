"""How long an event loop has not turned, seen from another thread, and what it is doing instead."""

import asyncio
import sys
import threading
import time
import traceback

TICK = 0.1
FRAMES = 25
SUSPECT = 1.0  # seconds of lag from which a beat says what the loop is doing


class Pulse:
    """Ticks in the loop that makes it; read from anywhere."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._last = time.monotonic()
        self.worst = 0.0
        """The longest the loop was seen to lag."""
        self._handle = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        self.worst = max(self.worst, self._late)
        self._last = time.monotonic()
        self._handle = self._loop.call_later(TICK, self._tick)

    def stop(self) -> None:
        """No more ticks."""
        self._handle.cancel()

    @property
    def lag(self) -> float:
        """Seconds the loop is late; none where it is the loop that asks, for then it turns."""
        return 0.0 if threading.get_ident() == self._thread else self._late

    @property
    def _late(self) -> float:
        return max(0.0, time.monotonic() - self._last - TICK)

    def doing(self) -> tuple[str, str]:
        """The name of the task that the loop is running, and its stack."""
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame, limit=FRAMES)) if frame is not None else ""
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:
            task = None
        return (task.get_name() if task is not None else ""), stack
