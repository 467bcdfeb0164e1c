"""The process above a worker: it holds the worker's life line, and sees to it that nothing of it remains.

    broker ==pipe==> keeper ---> worker ---> shells, servers, whatever agents start

A process cannot clean up after its own `kill -9`. So a worker forks before it loads anything: the parent stays behind
as its keeper, a few pages of memory that wait for one of two things, the end of the worker or the end of the broker.
Whatever the worker has started, daemons included, is inherited by the keeper (it is a subreaper), which ends it all and
removes the worker's temporary directory. If the keeper itself is killed, the kernel kills the worker.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_TIMEOUT = 5.0  # seconds after which what is still there is stuck in the kernel
POLL_INTERVAL = 0.01
SIGNAL_EXIT_OFFSET = 128  # added to the number of the signal that ended the worker


def fork_under_subreaper(temp_dir: Path, report_fd: int) -> None:
    """Fork; returns in the worker, never in the keeper. Standard input is the life line, `report` the worker's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watcher_pid, worker_pid = os.getpid(), os.fork()
    if worker_pid == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != watcher_pid:
            os._exit(1)
        _redirect_stdin_to_devnull()
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.close(report_fd)
    code = _wait_for_worker_or_broker(worker_pid)
    _kill_descendants()
    remove_temp_dir(temp_dir)
    os._exit(code)


def remove_temp_dir(temp_dir: Path) -> None:
    """Remove a worker's temporary directory, and the one of all workers with the last of them."""
    shutil.rmtree(temp_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        temp_dir.parent.rmdir()


def _wait_for_worker_or_broker(worker_pid: int) -> int:
    """Wait for the end of the worker, or bring it about when the broker lets go; returns its exit code."""
    pidfd = os.pidfd_open(worker_pid)
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    poller.register(pidfd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if 0 in ready and not os.read(0, 4096):
            os.kill(worker_pid, signal.SIGKILL)
            poller.unregister(0)
        if pidfd in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(worker_pid, 0)[1])
            return code if code >= 0 else SIGNAL_EXIT_OFFSET - code


def _kill_descendants() -> None:
    """Kill all that is left; whatever loses its parent meanwhile becomes a child of ours."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while time.monotonic() < deadline:
        for pid in _list_descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL_INTERVAL)


def _list_descendants() -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while extra := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= extra
    return [pid for pid in found if pid != os.getpid()]


def _redirect_stdin_to_devnull() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
