"""Ending processes that do not want to be found.

A process that starts another may do it in many ways: a child, a job in the background, a daemon that has left session
and parent behind. What they all inherit is the environment. So every program gets a mark in its own, and all that carry
it end together. Sessions end first, at one stroke, before anything in them can start more.

The environment of a process cannot be read for a moment while it becomes another program (`exec`), and again while it
ends. If a process of this user shows no environment, it is therefore looked at again before it counts as unmarked.
"""

import contextlib
import os
import signal
import time

import psutil

from ramify.errors import SandboxError

MARKER_VARIABLE = "RAMIFY_BOX"
KTHREADD = "kthreadd"  # the parent of all kernel threads; outside of containers its id is 2
MAX_KILL_ROUNDS = 100
KILL_INTERVAL = 0.02  # seconds between two looks; what is still there after all of them is stuck in the kernel
MAX_UNREADABLE_ROUNDS = 10  # looks in a row at processes without an environment; some never have one


def kill_process_group(pgid: int) -> None:
    """Kill the session of a program that has not been waited for yet, so that its id is still its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def kill_marked_processes(marker: str) -> None:
    """Kill all processes whose mark begins so, and return when there are none; blocks, so call it in a thread."""
    alive: set[psutil.Process] = set()  # marked processes that have not ended yet
    unreadable_rounds = 0
    for _ in range(MAX_KILL_ROUNDS):
        markers = {process: _read_marker(process) for process in psutil.process_iter()}
        marked = {process for process, own in markers.items() if own is not None and own.startswith(marker)}
        alive = marked | {process for process in alive if _is_alive(process)}
        unreadable_rounds = 0 if alive else unreadable_rounds + 1
        if not alive and (unreadable_rounds >= MAX_UNREADABLE_ROUNDS or None not in markers.values()):
            return
        for process in marked:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(KILL_INTERVAL)  # waiting for them by id would take the exit codes of those that asyncio waits for
    raise SandboxError(f"processes {sorted(process.pid for process in alive)} of a box do not end")


def _read_marker(process: psutil.Process) -> str | None:
    """Return the mark of a process, "" if it has none; None if it is this user's and shows no environment now."""
    environment: dict[str, str] = {}
    with contextlib.suppress(psutil.Error, OSError):
        environment = process.environ()
    if environment:
        return environment.get(MARKER_VARIABLE, "")
    return None if _is_alive(process) and _is_owned_by_user(process) else ""


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _is_owned_by_user(process: psutil.Process) -> bool:
    """Whether a process is this user's, and no kernel thread: those never have an environment."""
    try:
        return process.uids().effective == os.geteuid() and not _is_kernel_thread(process)
    except psutil.Error:
        return False


def _is_kernel_thread(process: psutil.Process) -> bool:
    """Whether a process is `kthreadd` or its child. In a container, process 2 is a process like any other."""
    parent = process.parent()
    return any(each.pid == 2 and each.name() == KTHREADD for each in (process, parent) if each is not None)
