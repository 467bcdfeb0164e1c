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
ENDING = 5.0  # seconds after which what is still there is stuck in the kernel
PAUSE = 0.01
BY_SIGNAL = 128  # added to the number of the signal that ended the worker


def keep(temporary: Path, report: int) -> None:
    """Fork; returns in the worker, never in the keeper. Standard input is the life line, `report` the worker's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper, worker = os.getpid(), os.fork()
    if worker == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(1)
        _forget_standard_input()
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.close(report)
    code = _watch(worker)
    _end_children()
    clear(temporary)
    os._exit(code)


def clear(temporary: Path) -> None:
    """Remove a worker's temporary directory, and the one of all workers with the last of them."""
    shutil.rmtree(temporary, ignore_errors=True)
    with contextlib.suppress(OSError):
        temporary.parent.rmdir()


def _watch(worker: int) -> int:
    """Wait for the end of the worker, or bring it about when the broker lets go; returns its exit code."""
    handle = os.pidfd_open(worker)
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    poller.register(handle, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if 0 in ready and not os.read(0, 4096):
            os.kill(worker, signal.SIGKILL)
            poller.unregister(0)
        if handle in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            return code if code >= 0 else BY_SIGNAL - code


def _end_children() -> None:
    """Kill all that is left; whatever loses its parent meanwhile becomes a child of ours."""
    end = time.monotonic() + ENDING
    while time.monotonic() < end:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(PAUSE)


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return [pid for pid in found if pid != os.getpid()]


def _forget_standard_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
