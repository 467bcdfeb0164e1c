"""Measures from another thread how long an event loop has been blocked, and by what."""

import asyncio
import linecache
import sys
import threading
import time
from itertools import accumulate, chain, islice, repeat, takewhile
from operator import attrgetter, methodcaller

TICK_INTERVAL = 0.1
MAX_STACK_FRAMES = 25
READ_FRAME = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")
LAG_REPORT_THRESHOLD = 1.0  # seconds of lag above which a heartbeat carries the running task and its stack


class LoopMonitor:
    """Monitors the event loop in which it is created; may be read from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread_id = threading.get_ident()
        self._last_tick = time.monotonic()
        self.max_lag = 0.0
        """The largest lag so far, in seconds."""
        self._handle = self._loop.call_later(TICK_INTERVAL, self._tick)

    def _tick(self) -> None:
        self.max_lag = max(self.max_lag, self._current_lag)
        self._last_tick = time.monotonic()
        self._handle = self._loop.call_later(TICK_INTERVAL, self._tick)

    def stop(self) -> None:
        """Stop monitoring."""
        self._handle.cancel()

    @property
    def lag(self) -> float:
        """Seconds the event loop is behind; 0 when read in the loop's own thread, which is then running."""
        return 0.0 if threading.get_ident() == self._loop_thread_id else self._current_lag

    @property
    def _current_lag(self) -> float:
        return max(0.0, time.monotonic() - self._last_tick - TICK_INTERVAL)

    def inspect_running_task(self) -> tuple[str, str]:
        """Return the name of the task that the loop is running, and the loop thread's stack."""
        stack = format_thread_stack(self._loop_thread_id, limit=MAX_STACK_FRAMES)
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:
            task = None
        return (task.get_name() if task is not None else ""), stack


def format_thread_stack(thread_id: int, limit: int | None = None) -> str:
    """Return the stack of a thread, outermost frame first; "" if there is no such thread. `limit` keeps inner frames.

    The thread may be running. Python code would release the interpreter lock between two frames, and the thread would
    run on and leave them; so one chain of C iterators reads all frames, and no bytecode runs meanwhile.
    `sys._current_frames` holds the lock of the list of threads. `faulthandler`, which is made for processes that die,
    does not: it crashes when a thread of a C library enters or leaves Python at that moment.
    """
    current_frames = sys._current_frames  # noqa: SLF001 - documented all the same
    innermost = islice(map(methodcaller("get", thread_id), iter(current_frames, None)), 1)
    frames = takewhile(bool, accumulate(chain(innermost, repeat("f_back")), getattr))
    lines = list(map(READ_FRAME, islice(frames, limit)))
    return "".join(_format_frame(*line) for line in reversed(lines))


def _format_frame(file: str, line: int, function: str) -> str:
    source = linecache.getline(file, line).strip()
    return f'  File "{file}", line {line} in {function}\n' + (f"    {source}\n" if source else "")
