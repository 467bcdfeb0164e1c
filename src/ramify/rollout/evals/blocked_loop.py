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
import mmap
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
from ramify.processes.exit import SIGNAL_EXIT_OFFSET, describe_exit
from ramify.processes.watcher import die_with_parent
from ramify.processes.wire import LoopMonitor

PAGE_BYTES = 1 << 16
FORWARDED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
SENT_BY_KERNEL = 0x80  # the code of a signal from the terminal, which the child gets too
MAX_SHOWN_ROLLOUTS = 8
ADVICE = (
    "code of the environment, or a library that it uses, ended the process; finished rollouts are kept, and the same "
    "command runs the others\nwith --workers 1 rollouts run in a separate process, which is replaced if it ends"
)


class CrashReporter:
    """Reports an eval whose process was ended by environment code: with `os._exit`, by a signal, for memory.

        command (waits and reports) ---> eval (event loop and environment)

    A process cannot report its own `os._exit`. So the command forks before it loads the environment. Both processes
    share a page of memory, to which the child writes which rollouts are running, and that it ends on purpose.
    """

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, PAGE_BYTES)
        self._write("before its first rollout")

    def fork(self) -> int | None:
        """Fork, and return None in the child. The parent waits for the child, and returns the command's exit code."""
        sys.stdout.flush()
        sys.stderr.flush()
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED_SIGNALS, signal.SIGCHLD})
        parent_pid, pid = os.getpid(), os.fork()
        if pid == 0:
            die_with_parent(parent_pid)
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
            with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr is not a file
                faulthandler.enable()
            return None
        code = _wait_and_forward_signals(pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        text = self._page[:].rstrip(b"\0").decode("utf-8", "replace")
        if text == "finished":
            return code if code >= 0 else SIGNAL_EXIT_OFFSET - code
        print(f"{ProcessDied.name}: the process of this eval {describe_exit(code)} {text}; {ADVICE}", file=sys.stderr)
        return code if code > 0 else SIGNAL_EXIT_OFFSET - code if code else 1

    def set_running(self, phase_by_rollout: Mapping[str, str]) -> None:
        """Write which rollouts are running, in which phase. A sampling agent is listed last: it runs no hook."""
        items = sorted(phase_by_rollout.items(), key=lambda item: item[1] in ("harness", "waiting"))
        shown = ", ".join(f"{id} ({phase})" for id, phase in items[:MAX_SHOWN_ROLLOUTS])
        more = f" and {len(items) - MAX_SHOWN_ROLLOUTS} more" if len(items) > MAX_SHOWN_ROLLOUTS else ""
        self._write(f"while it ran {shown}{more}" if items else "while no rollout was running")

    def set_finished(self) -> None:
        """Write that the child ends on purpose, and says why."""
        self._write("finished")

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")[:PAGE_BYTES]
        self._page[:] = data.ljust(PAGE_BYTES, b"\0")


def _wait_and_forward_signals(pid: int) -> int:
    """Wait for the exit of a child, forward signals that only this process got, and return the child's exit code."""
    while True:
        info = signal.sigwaitinfo({*FORWARDED_SIGNALS, signal.SIGCHLD})
        if info.si_signo == signal.SIGCHLD:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        elif info.si_code != SENT_BY_KERNEL:
            os.kill(pid, info.si_signo)


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
