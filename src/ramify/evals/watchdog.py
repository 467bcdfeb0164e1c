"""Ends a command whose event loop stands still, from a thread beside it.

Code of an environment that blocks inside `async def` stops everything: deadlines, signals, the display. Under workers a
broker in another process sees that and kills the worker. Here nobody else is there, and a thread that hangs cannot be
ended, so the whole process ends, by the same name and after the same time. What was finished is in the run's store.

Code that never releases the interpreter lock stops this thread too. For that case there is a timer without Python
(`faulthandler`), which this thread sets anew at every look: it prints the stacks and ends the process. Its clock also
runs while the process is suspended, so the timer is cancelled before Ctrl-Z (SIGTSTP) takes effect. SIGSTOP cannot be
handled: a process that it stops for longer than `hang_timeout` + STUCK seconds ends when it is continued.
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
from ramify.wire import Pulse

LOOK = 0.25  # seconds between two looks at the loop
GRACE = 3.0  # seconds for which the loop may stand still once the process was asked to end
STUCK = 10.0  # seconds beyond the limit after which the timer without Python fires
ENDING = {signal.SIGINT, signal.SIGTERM}
FAILED, INTERRUPTED = 1, 130  # exit codes


class Watchdog:
    """Watches one event loop at a time, from the main thread's `with` on; `advice` is printed when it ends the process.

    SIGINT and SIGTERM are handled by whoever handles them. Only where the loop stands still, so that nobody does, the
    process ends here.
    """

    def __init__(self, hang_timeout: float, advice: str) -> None:
        self._limit, self._advice = hang_timeout, advice
        self._pulse: Pulse | None = None
        self._asked_to_end, self._over = False, threading.Event()
        self._timer_lock = threading.RLock()  # the main thread may be signalled again while it holds it
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

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
        self._over.set()
        if self._handles_suspension:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.set_wakeup_fd(self._before)
        os.close(self._signalled)  # wakes the thread
        self._thread.join()
        os.close(self._signals)
        faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the running loop while the block runs."""
        pulse = self._pulse = Pulse()
        try:
            yield
        finally:
            self._pulse = None
            pulse.stop()

    @contextlib.contextmanager
    def allowing(self, seconds: float) -> Iterator[None]:
        """Let the loop stand still for longer while the block runs."""
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

    def _look(self) -> None:
        """Count the looks that find the loop standing still: time in which this process was stopped does not count."""
        standing = 0.0
        while not self._over.is_set():
            with self._timer_lock:
                if _stderr_is_a_file():
                    faulthandler.dump_traceback_later(self._limit + STUCK, exit=True)
            if select.select([self._signals], [], [], LOOK)[0]:
                self._asked_to_end |= bool(ENDING & set(os.read(self._signals, 4096)))
                continue
            pulse = self._pulse
            standing = standing + LOOK if pulse is not None and pulse.lag > 2 * LOOK else 0.0
            if pulse is None:
                continue
            if self._asked_to_end and standing > GRACE:
                self._end(f"stopped; {_describe(pulse, standing)}", INTERRUPTED)
            if standing > self._limit:
                self._end(f"{WorkerDied.name}: hung: {_describe(pulse, standing)}", FAILED)

    def _end(self, message: str, code: int) -> NoReturn:
        """End everything that was started here, and this process, at once."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        if sys.stdout.isatty():
            os.write(1, b"\x1b[?25h")  # the display has hidden the cursor
        os.write(2, f"{message}\n{self._advice}\n".encode())  # not through objects whose locks others may hold
        os._exit(code)


def _describe(pulse: Pulse, seconds: float) -> str:
    task, stack = pulse.doing()
    return f"the event loop stood still for {seconds:.1f} s in {task or 'no task'}:\n{stack}"


def _stderr_is_a_file() -> bool:
    """Whether `faulthandler` can write to it; programs may have put something else in its place."""
    try:
        return sys.stderr.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
