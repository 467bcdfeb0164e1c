"""A thread that ends the process when its event loop is blocked for too long.

Environment code that blocks inside `async def` stops everything: deadlines, signals, the display. With workers, a
broker in another process notices that and kills the worker. Without workers there is no other process, and Python
cannot end a thread that hangs, so the whole process ends, with the same failure and after the same time. Rollouts that
were finished are in the run's store.

Code that never releases the interpreter lock stops this thread too. For that case there is a timer without Python
(`faulthandler`), which this thread restarts at every poll: it prints the stacks and ends the process. Its clock also
runs while the process is suspended, so the timer is cancelled before Ctrl-Z (SIGTSTP) takes effect. SIGSTOP cannot be
handled: a process that it stops for longer than `hang_timeout` + TIMER_MARGIN seconds ends when it is continued.
"""

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import NoReturn, Self

import psutil

from ramify.errors import WorkerDied
from ramify.wire import LoopMonitor

POLL_INTERVAL = 0.25  # seconds between two polls of the loop
GRACE = 3.0  # seconds for which the loop may be blocked after SIGINT or SIGTERM
TIMER_MARGIN = 10.0  # seconds between `hang_timeout` and the timer without Python
END_SIGNALS = {signal.SIGINT, signal.SIGTERM}
FAILED, INTERRUPTED = 1, 130  # exit codes


class Watchdog:
    """Watches one event loop at a time. Enter it in the main thread; `advice` is printed when it ends the process.

    SIGINT and SIGTERM keep their handlers. If the loop is blocked, so that no handler can run, the watchdog ends the
    process.
    """

    def __init__(self, hang_timeout: float, advice: str) -> None:
        self._limit, self._advice = hang_timeout, advice
        self._pulse: LoopMonitor | None = None
        self._asked_to_end, self._closed = False, threading.Event()
        self._timer_lock = threading.RLock()  # the main thread may be signalled again while it holds it
        self._thread = threading.Thread(target=self._watch_loop, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._signals, self._signalled = os.pipe()
        os.set_blocking(self._signalled, False)
        self._before = signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        self._handles_suspension = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        if self._handles_suspension:
            signal.signal(signal.SIGTSTP, self._suspend)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed.set()
        if self._handles_suspension:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.set_wakeup_fd(self._before)
        os.close(self._signalled)  # wakes the thread
        self._thread.join()
        os.close(self._signals)
        faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the running loop while the `with` block runs."""
        pulse = self._pulse = LoopMonitor()
        try:
            yield
        finally:
            self._pulse = None
            pulse.stop()

    @contextlib.contextmanager
    def allowing(self, seconds: float) -> Iterator[None]:
        """Allow the loop to be blocked for `seconds` while the `with` block runs."""
        before, self._limit = self._limit, max(seconds, self._limit)
        try:
            yield
        finally:
            self._limit = before

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Stop this process as SIGTSTP would, without the timer; return when it is continued."""
        with self._timer_lock:  # the thread sets no timer meanwhile
            faulthandler.cancel_dump_traceback_later()
            os.kill(os.getpid(), signal.SIGSTOP)

    def _watch_loop(self) -> None:
        """Count the polls that find the loop blocked: time in which the process was stopped is not counted."""
        blocked_for = 0.0
        while not self._closed.is_set():
            with self._timer_lock:
                if _stderr_is_a_file():
                    faulthandler.dump_traceback_later(self._limit + TIMER_MARGIN, exit=True)
            if select.select([self._signals], [], [], POLL_INTERVAL)[0]:
                self._asked_to_end |= bool(END_SIGNALS & set(os.read(self._signals, 4096)))
                continue
            pulse = self._pulse
            blocked_for = blocked_for + POLL_INTERVAL if pulse is not None and pulse.lag > 2 * POLL_INTERVAL else 0.0
            if pulse is None:
                continue
            if self._asked_to_end and blocked_for > GRACE:
                self._end(f"stopped; {_describe(pulse, blocked_for)}", INTERRUPTED)
            if blocked_for > self._limit:
                self._end(f"{WorkerDied.name}: hung: {_describe(pulse, blocked_for)}", FAILED)

    def _end(self, message: str, code: int) -> NoReturn:
        """End everything that was started here, and this process, at once."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        if sys.stdout.isatty():
            os.write(1, b"\x1b[?25h")  # the display has hidden the cursor
        os.write(2, f"{message}\n{self._advice}\n".encode())  # not through objects whose locks others may hold
        os._exit(code)


def _describe(pulse: LoopMonitor, seconds: float) -> str:
    task, stack = pulse.inspect_running_task()
    return f"the event loop stood still for {seconds:.1f} s in {task or 'no task'}:\n{stack}"


def _stderr_is_a_file() -> bool:
    """Return whether `faulthandler` can write to stderr; a program may have replaced it by another object."""
    try:
        return sys.stderr.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
