"""The watcher process above a worker: it kills all processes of the worker when the worker or the broker ends.

    broker ==pipe==> watcher ---> worker ---> shells, servers, whatever agents start

A process cannot clean up after its own `kill -9`. So a worker forks before it loads anything: the parent becomes the
watcher, which needs only a few pages of memory and waits until the worker exits or the broker closes the pipe. The
watcher is a subreaper: it inherits all processes that the worker started, daemons included, kills them and removes the
worker's temporary directory. If the watcher itself is killed, the kernel kills the worker.
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
KILL_TIMEOUT = 5.0  # seconds after which a process that still exists is stuck in the kernel
POLL_INTERVAL = 0.01
SIGNAL_EXIT_OFFSET = 128  # added to the number of the signal that killed the worker


def fork_under_subreaper(temp_dir: Path, report_fd: int) -> None:
    """Fork, and return in the worker only; the parent becomes the watcher and never returns.

    Standard input is the pipe of the broker. `report_fd` is used by the worker only.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watcher_pid, worker_pid = os.getpid(), os.fork()
    if worker_pid == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != watcher_pid:
            os._exit(1)
        with Path(os.devnull).open("rb") as devnull:
            os.dup2(devnull.fileno(), 0)
        return
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.close(report_fd)
    code = _wait_for_worker_or_broker(worker_pid)
    _kill_descendants()
    remove_temp_dir(temp_dir)
    os._exit(code)


def remove_temp_dir(temp_dir: Path) -> None:
    """Remove a worker's temporary directory, and the parent directory if it is empty."""
    shutil.rmtree(temp_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        temp_dir.parent.rmdir()


def _wait_for_worker_or_broker(worker_pid: int) -> int:
    """Wait until the worker exits, and kill it if the broker closes the pipe; return the worker's exit code."""
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
    """Kill all descendants. Processes that lose their parent meanwhile become children of this process."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        import psutil  # imported only if there are descendants, so that the watcher stays small

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(POLL_INTERVAL)
