"""Ending processes that do not want to be found.

A process that starts another may do it in many ways: a child, a job in the background, a daemon that has left session
and parent behind. What they all inherit is the environment. So every program gets a mark in its own, and all that carry
it end together. Sessions end first, at one stroke, before anything in them can start more.

A process has no environment to be read for a moment while it becomes another program (`exec`), and again while it ends.
One that is ours and shows none is therefore looked at again before it counts as a stranger.
"""

import contextlib
import os
import signal
import time

import psutil

from ramify.errors import SandboxError

MARK = "RAMIFY_BOX"
KERNEL = 2  # the process that all threads of the kernel descend from
ROUNDS = 100
PAUSE = 0.02  # seconds between two looks; what is still there after all of them is stuck in the kernel
UNSURE = 10  # looks in a row for processes without an environment; some have none all their life


def end_group(leader: int) -> None:
    """Kill the session of a program that has not been waited for yet, so that its id is still its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_marked(mark: str) -> None:
    """Kill all processes whose mark begins so, and return when there are none; blocks, so call it in a thread."""
    left: set[psutil.Process] = set()  # that were killed, and may not have ended yet
    unsure = 0
    for _ in range(ROUNDS):
        marks = {process: _mark(process) for process in psutil.process_iter()}
        found = {process for process, its in marks.items() if its is not None and its.startswith(mark)}
        left = found | {process for process in left if _lives(process)}
        unsure = 0 if left else unsure + 1
        if not left and (unsure >= UNSURE or None not in marks.values()):
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(PAUSE)  # waiting for them by id would take the exit codes of those that asyncio waits for
    raise SandboxError(f"processes {sorted(process.pid for process in left)} of a box do not end")


def _mark(process: psutil.Process) -> str | None:
    """Return the mark of a process, "" if it has none; None for one of ours whose environment cannot be seen now."""
    environment: dict[str, str] = {}
    with contextlib.suppress(psutil.Error, OSError):
        environment = process.environ()
    if environment:
        return environment.get(MARK, "")
    return None if _lives(process) and _is_ours(process) else ""


def _lives(process: psutil.Process) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _is_ours(process: psutil.Process) -> bool:
    """Whether a process is this user's, and no thread of the kernel: those never have an environment."""
    try:
        return process.uids().effective == os.geteuid() and KERNEL not in (process.pid, process.ppid())
    except psutil.Error:
        return False
