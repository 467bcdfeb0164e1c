"""Kill every process that a program has started, daemons included.

A program of a runtime may start children, background jobs, and daemons that have left its session and lost their
parent. All of them inherit its environment. So every program gets a marker variable, and all processes with the marker
are killed.

The environment of a process is unreadable for a moment during `exec` and while it exits. If a process of this user has
no readable environment, it is therefore checked again before it counts as unmarked.
"""

import contextlib
import os
import signal
import time

import psutil

from ramify.core.errors import SandboxError

MARKER_VARIABLE = "RAMIFY_SANDBOX"
"""The environment variable of the marker, RUNTIME.PROGRAM. (an id and a number); a prefix selects all of a runtime.

"Sandbox" means the runtime. The name is kept because running programs carry it in their environment.
"""
KTHREADD = "kthreadd"  # the parent of all kernel threads; its pid is 2, except in containers
MAX_KILL_ROUNDS = 100
KILL_INTERVAL = 0.02  # seconds between two rounds; a process that survives all of them is stuck in the kernel
START_TIME_TOLERANCE = 5.0  # seconds: start times are derived from a clock that may be adjusted
MAX_UNREADABLE_ROUNDS = 10  # rounds in a row to wait for processes without an environment; some never get one


def kill_process_group(pgid: int) -> None:
    """Kill a process group. Its leader must not have been waited for yet: its id could then belong to another group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def kill_descendants(*, spared_name: str | None = None) -> None:
    """Kill all descendants of this process but those with the spared name. Only a subreaper finds orphans."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.name() != spared_name:
                child.kill()


def kill_marked_processes(marker: str, *, started_after: float = 0.0) -> None:
    """Kill all processes whose marker starts with `marker`; return when none is left. Blocks: call it in a thread.

    `started_after` is the time (of `time.time`) before which none of them can have started. Older processes are not
    examined: some never have a readable environment, and waiting for it takes long.
    """
    alive: set[psutil.Process] = set()  # marked processes that have not exited yet
    unreadable_rounds = 0
    oldest_start = started_after - START_TIME_TOLERANCE
    for _ in range(MAX_KILL_ROUNDS):
        processes = [process for process in psutil.process_iter() if _start_time(process) >= oldest_start]
        markers = {process: _read_marker(process) for process in processes}
        marked = {process for process, value in markers.items() if value is not None and value.startswith(marker)}
        alive = marked | {process for process in alive if _is_alive(process)}
        unreadable_rounds = 0 if alive else unreadable_rounds + 1
        if not alive and (unreadable_rounds >= MAX_UNREADABLE_ROUNDS or None not in markers.values()):
            return
        for process in marked:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(KILL_INTERVAL)  # `waitpid` would consume the exit codes that asyncio waits for
    raise SandboxError(f"processes {sorted(process.pid for process in alive)} cannot be killed")


def _start_time(process: psutil.Process) -> float:
    """Return when a process started; 0 if it is gone."""
    try:
        return process.create_time()
    except psutil.Error:
        return 0.0


def _read_marker(process: psutil.Process) -> str | None:
    """Return the marker of a process, "" if it has none, None if it is this user's with an unreadable environment."""
    environment: dict[str, str] = {}
    with contextlib.suppress(psutil.Error, OSError):
        environment = process.environ()
    if environment:
        return environment.get(MARKER_VARIABLE, "")
    return None if _is_alive(process) and _is_owned_by_user(process) else ""


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process exists and has not exited."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _is_owned_by_user(process: psutil.Process) -> bool:
    """Return whether a process belongs to this user and is not a kernel thread: those never have an environment."""
    try:
        return process.uids().effective == os.geteuid() and not _is_kernel_thread(process)
    except psutil.Error:
        return False


def _is_kernel_thread(process: psutil.Process) -> bool:
    """Return whether a process is `kthreadd` or its child. In a container, pid 2 is an ordinary process."""
    ancestors = (process, process.parent())
    return any(ancestor.pid == 2 and ancestor.name() == KTHREADD for ancestor in ancestors if ancestor is not None)
