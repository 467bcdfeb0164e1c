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
SHUTDOWN_TIMEOUT = 3.0  # seconds for which the loop may be blocked after SIGINT or SIGTERM
TIMER_MARGIN = 10.0  # seconds between `hang_timeout` and the timer without Python
END_SIGNALS = {signal.SIGINT, signal.SIGTERM}
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130  # exit codes


class Watchdog:
    """Watches one event loop at a time. Enter it in the main thread; `advice` is printed when it ends the process.

    SIGINT and SIGTERM keep their handlers. If the loop is blocked, so that no handler can run, the watchdog ends the
    process.
    """

    def __init__(self, hang_timeout: float, advice: str) -> None:
        self._hang_timeout, self._advice = hang_timeout, advice
        self._pulse: LoopMonitor | None = None
        self._stop_requested, self._closed = False, threading.Event()
        self._timer_lock = threading.RLock()  # the main thread may be signalled again while it holds it
        self._thread = threading.Thread(target=self._poll_loop, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._signal_reader, self._signal_writer = os.pipe()
        os.set_blocking(self._signal_writer, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._signal_writer, warn_on_full_buffer=False)
        self._handles_suspension = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        if self._handles_suspension:
            signal.signal(signal.SIGTSTP, self._suspend)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._handles_suspension:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._signal_writer)  # wakes the thread
        self._thread.join()
        os.close(self._signal_reader)
        faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the running loop while the `with` block runs."""
        pulse = self._pulse = LoopMonitor()
        try:
            yield
        finally:
            self._pulse = None
            pulse.stop()

    @contextlib.contextmanager
    def extend_timeout(self, seconds: float) -> Iterator[None]:
        """Allow the loop to be blocked for `seconds` while the `with` block runs."""
        previous, self._hang_timeout = self._hang_timeout, max(seconds, self._hang_timeout)
        try:
            yield
        finally:
            self._hang_timeout = previous

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Stop this process as SIGTSTP would, without the timer; return when it is continued."""
        with self._timer_lock:  # the thread sets no timer meanwhile
            faulthandler.cancel_dump_traceback_later()
            os.kill(os.getpid(), signal.SIGSTOP)

    def _poll_loop(self) -> None:
        """Count the polls that find the loop blocked: time in which the process was stopped is not counted."""
        blocked_for = 0.0
        while not self._closed.is_set():
            with self._timer_lock:
                if _stderr_has_fileno():
                    faulthandler.dump_traceback_later(self._hang_timeout + TIMER_MARGIN, exit=True)
            if select.select([self._signal_reader], [], [], POLL_INTERVAL)[0]:
                self._stop_requested |= bool(END_SIGNALS & set(os.read(self._signal_reader, 4096)))
                continue
            pulse = self._pulse
            blocked_for = blocked_for + POLL_INTERVAL if pulse is not None and pulse.lag > 2 * POLL_INTERVAL else 0.0
            if pulse is None:
                continue
            if self._stop_requested and blocked_for > SHUTDOWN_TIMEOUT:
                self._terminate(f"stopped; {_describe_block(pulse, blocked_for)}", EXIT_INTERRUPTED)
            if blocked_for > self._hang_timeout:
                self._terminate(f"{WorkerDied.name}: hung: {_describe_block(pulse, blocked_for)}", EXIT_FAILED)

    def _terminate(self, message: str, exit_code: int) -> NoReturn:
        """End everything that was started here, and this process, at once."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        if sys.stdout.isatty():
            os.write(1, b"\x1b[?25h")  # the display has hidden the cursor
        os.write(2, f"{message}\n{self._advice}\n".encode())  # not through objects whose locks others may hold
        os._exit(exit_code)


def _describe_block(pulse: LoopMonitor, seconds: float) -> str:
    task, stack = pulse.inspect_running_task()
    return f"the event loop stood still for {seconds:.1f} s in {task or 'no task'}:\n{stack}"


def _stderr_has_fileno() -> bool:
    """Return whether `faulthandler` can write to stderr; a program may have replaced it by another object."""
    try:
        return sys.stderr.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
