"""Measures from another thread how long an event loop has been blocked, and by what."""

import asyncio
import faulthandler
import linecache
import re
import tempfile
import threading
import time

TICK_INTERVAL = 0.1
MAX_STACK_FRAMES = 25
FRAME_PATTERN = re.compile(r'  File "(.*)", line (\d+) in .*')
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

    `faulthandler` reads all frames at once. Python code would release the interpreter lock between two frames, and the
    thread would run on meanwhile: CPython 3.11 has crashed there.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        sections = file.read().split("\n\n")
    header = re.compile(rf"(Thread|Current thread) 0x0*{thread_id:x} ")
    frames = [line for section in sections if header.match(section) for line in section.splitlines()[1:]]
    if not frames and any(thread.ident == thread_id for thread in threading.enumerate()):
        return "  (not available: faulthandler shows the newest 100 threads)\n"
    return "".join(_format_frame(line) for line in reversed(frames[:limit]))


def _format_frame(line: str) -> str:
    """Add the source to a line of `faulthandler`, such as `  File "env.py", line 7 in step`."""
    match = FRAME_PATTERN.fullmatch(line)
    source = linecache.getline(match[1], int(match[2])).strip() if match else ""
    return f"{line}\n    {source}\n" if source else f"{line}\n"
