"""`python -m ramify.launch.parent_watch GRACE COMMAND ...`: a command that ends with its supervisor.

    supervisor ==socket==> leash ---> command ---> whatever it starts

A process cannot clean up after its own `kill -9`, so something small has to stand above it. The leash waits for one of
two things: the end of the command, whose exit code becomes its own (128 + n for signal n), or the end of its standard
input, which the kernel closes however the supervisor dies. Then the command is asked to end, killed after GRACE
seconds, and what it left behind, daemons included, is inherited by the leash (it is a subreaper) and killed too. If the
leash itself is killed, the kernel kills the command.
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
KILL_TIMEOUT = 2.0  # seconds after which what is still there is stuck in the kernel
POLL_INTERVAL = 0.01
SIGNAL_EXIT_OFFSET = 128  # added to the number of the signal that ended the command
EXIT_NOT_STARTED = 127  # the exit code of a command that cannot be started


def run_watched(run: Callable[[], int], *, stop_timeout: float) -> int:
    """Run something in a child, and return what it returns there; here we end, with the same, when it is over.

    Over standard input go our process id and the child's, with a handle of ourselves, and in the end the exit code.
    """
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    leash, pid = os.getpid(), os.fork()
    if pid == 0:
        die_with_parent(leash)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return run()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the command
    control_socket = socket.socket(fileno=os.dup(0))
    with contextlib.suppress(OSError):
        socket.send_fds(control_socket, [f"{leash} {pid}".encode()], [os.pidfd_open(leash)])
    code = _wait_for_exit(pid, stop_timeout)
    _kill_descendants()
    with contextlib.suppress(OSError):
        control_socket.send(str(code).encode())
    os._exit(code)  # at once, whatever was loaded


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends, however it ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(EXIT_NOT_STARTED)


def exec_command(command: Sequence[str]) -> NoReturn:
    """Be the command from now on."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(EXIT_NOT_STARTED)


def _wait_for_exit(pid: int, stop_timeout: float) -> int:
    """Wait for the end of the command, or bring it about when the supervisor lets go; returns its exit code."""
    handle = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    poller.register(handle, select.POLLIN)
    end: float | None = None
    while True:
        left = None if end is None else max(0.0, end - time.monotonic()) * 1000
        ready = [fd for fd, _ in poller.poll(left)]
        if handle in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return code if code >= 0 else SIGNAL_EXIT_OFFSET - code
        if 0 in ready and _is_parent_gone():
            poller.unregister(0)
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            end = time.monotonic() + stop_timeout
        elif end is not None and time.monotonic() >= end:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            end = None


def _is_parent_gone() -> bool:
    try:
        return not os.read(0, 4096)
    except OSError:  # the supervisor died before it read the process id
        return True


def _kill_descendants() -> None:
    """Kill all that is left; whatever loses its parent meanwhile becomes a child of ours."""
    end = time.monotonic() + KILL_TIMEOUT
    while time.monotonic() < end:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        import psutil  # a leash is small; most commands leave nothing behind

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(POLL_INTERVAL)


if __name__ == "__main__":
    sys.exit(run_watched(lambda: exec_command(sys.argv[2:]), stop_timeout=float(sys.argv[1])))
