"""A check of the process's watchdog that ends the process if its event loop is blocked for too long.

Environment code that blocks inside `async def` stops everything: timeouts, signals, the display. With workers, a broker
in another process notices that and kills the worker. Without workers there is no other process, and Python cannot stop
a hanging thread, so the whole process ends, with the same failure and after the same time. Finished rollouts are in the
run's store.

Code that never releases the interpreter lock stops the watchdog too. For that case a timer outside Python
(`faulthandler`), which the watchdog restarts at every poll, prints the stacks and ends the process. The timer also runs
while the process is suspended, so it is cancelled before Ctrl-Z (SIGTSTP) takes effect. SIGSTOP cannot be handled: a
process that is stopped by it for longer than `hang_timeout` + TIMER_MARGIN seconds ends when it is continued.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Generator, Mapping
from functools import partial
from types import FrameType, TracebackType
from typing import NoReturn, Self

from ramify.core.errors import ProcessDied
from ramify.core.terminal import escape_controls
from ramify.core.watchdog import EXIT_FAILED, WATCHDOG, print_unlocked
from ramify.processes.cleanup import kill_descendants
from ramify.processes.wire import LoopMonitor
from ramify.rollout.evals.crash_report import CrashReporter

SHUTDOWN_TIMEOUT = 3.0  # seconds for which the loop may be blocked after SIGINT or SIGTERM
TIMER_MARGIN = 10.0  # seconds by which the faulthandler timer exceeds `hang_timeout`
END_SIGNALS = {signal.SIGINT, signal.SIGTERM}
EXIT_INTERRUPTED = 130  # exit code


class LoopWatchdog:
    """Watches one event loop at a time. Enter it in the main thread; `advice` is printed when it ends the process.

    `crash_reporter` reports if the process ends in another way. SIGINT and SIGTERM keep their handlers. While the loop
    is blocked no handler can run, so the watchdog ends the process.
    """

    def __init__(self, hang_timeout: float, advice: str, crash_reporter: CrashReporter | None = None) -> None:
        self._hang_timeout, self._advice, self._crash_reporter = hang_timeout, advice, crash_reporter
        self._monitor: LoopMonitor | None = None
        self._stop_requested, self._blocked_for = False, 0.0
        self._timer_lock = threading.RLock()  # the main thread may be signalled again while it holds it

    def __enter__(self) -> Self:
        self._signal_reader, self._signal_writer = os.pipe()
        os.set_blocking(self._signal_reader, False)
        os.set_blocking(self._signal_writer, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._signal_writer, warn_on_full_buffer=False)
        self._handles_suspension = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        if self._handles_suspension:
            signal.signal(signal.SIGTSTP, self._suspend)
        WATCHDOG.cleanups.append(self._clean_up)
        WATCHDOG.add_check(self._check)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        WATCHDOG.remove_check(self._check)
        WATCHDOG.cleanups.remove(self._clean_up)
        if self._handles_suspension:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._signal_writer)
        os.close(self._signal_reader)
        faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def watch(self) -> Generator[None]:
        """Watch the running loop while the `with` block runs."""
        monitor = self._monitor = LoopMonitor()
        try:
            yield
        finally:
            self._monitor = None
            monitor.stop()

    @contextlib.contextmanager
    def extend_timeout(self, seconds: float) -> Generator[None]:
        """Allow the loop to be blocked for `seconds` while the `with` block runs."""
        previous, self._hang_timeout = self._hang_timeout, max(seconds, self._hang_timeout)
        try:
            yield
        finally:
            self._hang_timeout = previous

    def set_running(self, phase_by_rollout: Mapping[str, str]) -> None:
        """Remember which rollouts are running, in which phase, for the report of a crash."""
        if self._crash_reporter is not None:
            self._crash_reporter.set_running(phase_by_rollout)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Stop this process as SIGTSTP would, with the timer cancelled; return when it is continued."""
        with self._timer_lock:  # the thread must not set the timer meanwhile
            faulthandler.cancel_dump_traceback_later()
            os.kill(os.getpid(), signal.SIGSTOP)

    def _check(self) -> None:
        """End the process if too many polls find the loop blocked. There are no polls while the process is stopped."""
        with self._timer_lock:
            if _stderr_has_fileno():
                faulthandler.dump_traceback_later(self._hang_timeout + TIMER_MARGIN, exit=True)
        with contextlib.suppress(BlockingIOError):
            self._stop_requested |= bool(END_SIGNALS & set(os.read(self._signal_reader, 4096)))
        interval, monitor = WATCHDOG.settings.poll_interval, self._monitor
        if monitor is None or monitor.lag <= 2 * interval:
            self._blocked_for = 0.0
            return
        self._blocked_for += interval
        if self._stop_requested and self._blocked_for > SHUTDOWN_TIMEOUT:
            self._end_process(f"interrupted; {_describe_block(monitor, self._blocked_for)}", EXIT_INTERRUPTED)
        if self._blocked_for > self._hang_timeout:
            problem = f"hung: {_describe_block(monitor, self._blocked_for)}"
            self._end_process(f"{ProcessDied.name}: {problem}", EXIT_FAILED)

    def _end_process(self, message: str, exit_code: int) -> NoReturn:
        WATCHDOG.end_process(partial(print_unlocked, escape_controls(f"{message}\n{self._advice}")), exit_code)

    def _clean_up(self) -> None:
        """Kill all child processes before this process ends."""
        if self._crash_reporter is not None:
            self._crash_reporter.set_finished()
        kill_descendants()


def _describe_block(monitor: LoopMonitor, seconds: float) -> str:
    task, stack = monitor.inspect_running_task()
    return f"the event loop was blocked for {seconds:.1f} s in {task or 'no task'}:\n{stack}"


def _stderr_has_fileno() -> bool:
    """Return whether `faulthandler` can write to stderr; a program may have replaced it by another object."""
    try:
        return sys.stderr.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
