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
    found: list[psutil.Process] = []
    unsure = 0
    for _ in range(ROUNDS):
        marks = [(process, _mark(process)) for process in psutil.process_iter()]
        found = [process for process, found_mark in marks if found_mark is not None and found_mark.startswith(mark)]
        unsure = unsure + 1 if not found else 0
        if not found and (unsure >= UNSURE or not any(found_mark is None for _, found_mark in marks)):
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(PAUSE)  # waiting for them by id would take the exit codes of those that asyncio waits for
    raise SandboxError(f"processes {[process.pid for process in found]} of a box do not end")


def _mark(process: psutil.Process) -> str | None:
    """Return the mark of a process, "" if it has none; None for one of ours whose environment cannot be seen now."""
    try:
        environment = process.environ()
        if environment:
            return environment.get(MARK, "")
        # zombies and threads of the kernel never have one
        stranger = process.uids().effective != os.geteuid() or process.status() == psutil.STATUS_ZOMBIE
        return "" if stranger or KERNEL in (process.pid, process.ppid()) else None
    except (psutil.Error, OSError):
        return ""  # gone, a zombie, or somebody else's
