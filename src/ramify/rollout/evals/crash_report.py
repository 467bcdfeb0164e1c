"""Reports an eval whose process was ended by environment code: with `os._exit`, by a segmentation fault, for memory.

    command (waits and reports) ---> eval (event loop and environment)

A process cannot report its own `os._exit`. So the command forks before it loads the environment: the child runs the
eval, and the parent waits for it. They share a page of memory, to which the child writes which rollouts are running,
and that it ends on purpose.
"""

import contextlib
import faulthandler
import mmap
import os
import signal
import sys
from collections.abc import Mapping

from ramify.core.errors import ProcessDied
from ramify.processes.exit_codes import SIGNAL_EXIT_OFFSET, describe_exit
from ramify.processes.watcher import die_with_parent

PAGE_BYTES = 1 << 16
FORWARDED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
SENT_BY_KERNEL = 0x80  # the code of a signal from the terminal, which the child gets too
MAX_SHOWN_ROLLOUTS = 8
ADVICE = (
    "code of the environment, or a library that it uses, ended the process; finished rollouts are kept, and the same "
    "command runs the others\nwith --workers 1 rollouts run in a separate process, which is replaced if it ends"
)


class CrashReporter:
    """The page of memory that the process of an eval shares with the process that waits for it."""

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
