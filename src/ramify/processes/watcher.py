"""`python -m ramify.processes.watcher TIMEOUT COMMAND ...`: run a command, and stop it when the parent process exits.

    parent ==control socket==> watcher ---> command ---> its descendants

A process cannot clean up after its own `kill -9`, so a small watcher process is its parent. The watcher waits for the
exit of the command, whose exit code becomes its own (128 + n for signal n), or for the end of its standard input, which
the kernel closes however the parent dies. In the latter case the command gets SIGTERM, and SIGKILL after TIMEOUT
seconds. The watcher is a subreaper: it inherits the descendants of the command, daemons included, reaps and kills them.
If the watcher itself is killed, the kernel kills the command.

The parent may send the end of a lease over the control socket, again and again. At the last one that was received, the
watcher kills the command and its descendants at once, also if these are stopped or the parent is.
"""

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from ramify.processes.exit import EXIT_NOT_STARTED, SIGNAL_EXIT_OFFSET

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
DETACH_FLAG = "--detach"  # the watcher is then no child of the process that starts it
WATCHER_NAME = "ramify-watcher"  # at most 15 bytes
DESCENDANTS_TIMEOUT = 2.0  # seconds after which a killed process must be stuck in the kernel
CLEANUP_TIMEOUT = 1.5  # seconds of these for the watchers below this one to clean up; they end by themselves
MAX_POLL_SECONDS = 1.0  # the clock of `poll` stands still while the machine is suspended; the clock of leases does not
POLL_INTERVAL = 0.01  # seconds between attempts to kill the descendants


def fork_under_watcher(*, stop_timeout: float, cleanup: Callable[[], None] | None = None) -> None:
    """Fork, and return in the child only. The parent becomes the watcher of the child, and exits with its exit code.

    Standard input must be the control socket. The watcher sends its own pid, the child's pid and its own pidfd over it,
    and at the end the exit code. It calls `cleanup` after the child and all descendants have exited. If the start has
    timed out in the parent process, or that process has exited, nothing is forked.
    """
    lease_end = _read_lease_end()
    if lease_end is None:
        if cleanup is not None:
            cleanup()
        os._exit(EXIT_NOT_STARTED)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watcher_pid, pid = os.getpid(), os.fork()
    if pid == 0:
        die_with_parent(watcher_pid)
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.close(devnull)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # only the command handles them
    LIBC.prctl(PR_SET_NAME, WATCHER_NAME.encode(), 0, 0, 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # only the command uses them
    control_socket = socket.socket(fileno=os.dup(0))
    with contextlib.suppress(OSError):
        socket.send_fds(control_socket, [f"{watcher_pid} {pid}".encode()], [os.pidfd_open(watcher_pid)])
    exit_code = _wait_for_exit(pid, stop_timeout, lease_end)
    _kill_orphans()
    if cleanup is not None:
        cleanup()
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


def _wait_for_exit(pid: int, stop_timeout: float, lease_end: float) -> int:
    """Wait for the exit of the command, stop it if the parent process exits first, and return its exit code.

    Orphans that exit meanwhile are reaped: the watcher of a process that runs for days would collect thousands.
    """
    pidfd, child_exits = os.pidfd_open(pid), _open_child_exits()
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    poller.register(child_exits, select.POLLIN)
    deadline = math.inf
    while True:
        exit_code = _reap_children(pid)  # a child may have exited before its signal was watched
        if exit_code is not None:
            return exit_code
        seconds = min(deadline - time.monotonic(), lease_end - time.clock_gettime(time.CLOCK_BOOTTIME))
        timeout = None if seconds == math.inf else max(0.0, min(seconds, MAX_POLL_SECONDS)) * 1000
        ready = [fd for fd, _ in poller.poll(timeout)]
        if child_exits in ready:
            os.read(child_exits, 4096)  # no `continue`: exits without end must not hide the parent and the deadline
        if 0 in ready:
            message = _read_message()
            if message:
                lease_end = float(message)
                continue  # after a pause of this process there may be a later one
            poller.unregister(0)  # the parent process is gone
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            deadline = time.monotonic() + stop_timeout
        if time.monotonic() >= deadline or time.clock_gettime(time.CLOCK_BOOTTIME) >= lease_end:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            deadline = lease_end = math.inf


def _open_child_exits() -> int:
    """Return a pipe that becomes readable whenever a child of this process exits."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _ignore)
    return read_fd


def _ignore(_signal: int, _frame: object) -> None:
    """Do nothing: the signal is noticed through the pipe."""


def _reap_children(pid: int) -> int | None:
    """Reap all children that have exited; return the exit code of the one with this pid, None if it still runs."""
    while (result := os.waitpid(-1, os.WNOHANG))[0]:
        if result[0] == pid:
            code = os.waitstatus_to_exitcode(result[1])
            return code if code >= 0 else SIGNAL_EXIT_OFFSET - code
    return None


def _read_lease_end() -> float | None:
    """Return the end of the lease that was received last, infinity for none; None if the parent wants no process."""
    poller, lease_end = select.poll(), math.inf
    poller.register(0, select.POLLIN | select.POLLHUP)
    while poller.poll(0):
        if not (message := _read_message()):
            return None
        lease_end = float(message)
    return lease_end


def _read_message() -> bytes:
    """Return the next message of the parent process; nothing if it has closed the control socket."""
    try:
        return os.read(0, 4096)
    except OSError:  # the parent process died before it received the pids
        return b""


def _kill_orphans() -> None:
    """Kill all remaining descendants; orphans become children of this subreaper."""
    started_at = time.monotonic()
    while (elapsed := time.monotonic() - started_at) < DESCENDANTS_TIMEOUT:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        from ramify.processes.cleanup import kill_descendants

        kill_descendants(spared_name=WATCHER_NAME if elapsed < CLEANUP_TIMEOUT else None)
        time.sleep(POLL_INTERVAL)


def _detach() -> None:
    """Continue in a process without a parent, in a session of its own."""
    if os.fork():
        os._exit(0)
    os.setsid()


if __name__ == "__main__":
    if sys.argv[1] == DETACH_FLAG:
        _detach()
        del sys.argv[1]
    fork_under_watcher(stop_timeout=float(sys.argv[1]))
    exec_command(sys.argv[2:])
