"""`python -m ramify.launch.parent_watch TIMEOUT COMMAND ...`: run a command, and kill it when the supervisor exits.

    supervisor ==control socket==> watcher ---> command ---> its descendants

A process cannot clean up after its own `kill -9`, so a small watcher process is its parent. The watcher waits for the
exit of the command, whose exit code becomes its own (128 + n for signal n), or for the end of its standard input, which
the kernel closes however the supervisor dies. In the latter case the command gets SIGTERM, and SIGKILL after TIMEOUT
seconds. The watcher is a subreaper: it inherits the descendants of the command, daemons included, and kills them too.
If the watcher itself is killed, the kernel kills the command.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_TIMEOUT = 2.0  # seconds after which a killed process must be stuck in the kernel
POLL_INTERVAL = 0.01  # seconds between attempts to kill the descendants
SIGNAL_EXIT_OFFSET = 128  # added to the number of the signal that killed the command
EXIT_NOT_STARTED = 127  # exit code of a command that cannot be started


def run_watched(run: Callable[[], int], *, stop_timeout: float) -> int:
    """Fork. The child returns the result of `run`; the parent watches it, and exits with the child's exit code.

    The parent sends its own pid, the child's pid and its own pidfd over the control socket, which is its standard
    input, and at the end the exit code.
    """
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watcher_pid, pid = os.getpid(), os.fork()
    if pid == 0:
        die_with_parent(watcher_pid)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return run()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # only the command handles them
    control_socket = socket.socket(fileno=os.dup(0))
    with contextlib.suppress(OSError):
        socket.send_fds(control_socket, [f"{watcher_pid} {pid}".encode()], [os.pidfd_open(watcher_pid)])
    exit_code = _wait_for_exit(pid, stop_timeout)
    _kill_descendants()
    with contextlib.suppress(OSError):
        control_socket.send(str(exit_code).encode())
    os._exit(exit_code)  # skip the cleanup of imported modules


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent exits, however it exits."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(EXIT_NOT_STARTED)


def exec_command(command: Sequence[str]) -> NoReturn:
    """Replace this process by the command; exit with EXIT_NOT_STARTED if it cannot be started."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(EXIT_NOT_STARTED)


def _wait_for_exit(pid: int, stop_timeout: float) -> int:
    """Wait for the exit of the command, stop it if the supervisor exits first, and return its exit code."""
    pidfd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    poller.register(pidfd, select.POLLIN)
    deadline: float | None = None
    while True:
        poll_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = [fd for fd, _ in poller.poll(poll_ms)]
        if pidfd in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return code if code >= 0 else SIGNAL_EXIT_OFFSET - code
        if 0 in ready and _is_parent_gone():
            poller.unregister(0)
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            deadline = time.monotonic() + stop_timeout
        elif deadline is not None and time.monotonic() >= deadline:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            deadline = None


def _is_parent_gone() -> bool:
    try:
        return not os.read(0, 4096)
    except OSError:  # the supervisor died before it received the pids
        return True


def _kill_descendants() -> None:
    """Kill all remaining descendants; orphans become children of this subreaper."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        import psutil  # imported late to keep the watcher small: most commands leave no descendants

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(POLL_INTERVAL)


if __name__ == "__main__":
    sys.exit(run_watched(lambda: exec_command(sys.argv[2:]), stop_timeout=float(sys.argv[1])))
