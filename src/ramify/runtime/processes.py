"""Ending processes that do not want to be found.

A process that starts another may do it in many ways: a child, a job in the background, a daemon that has left session
and parent behind. What they all inherit is the environment. So every program gets a mark in its own, and all that carry
it end together. Sessions end first, at one stroke, before anything in them can start more.
"""

import contextlib
import os
import signal
import time

import psutil

from ramify.errors import SandboxError

MARK = "RAMIFY_BOX"
ROUNDS = 100
PAUSE = 0.02  # seconds between two looks; what is still there after all of them is stuck in the kernel


def end_group(leader: int) -> None:
    """Kill the session of a program that has not been waited for yet, so that its id is still its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_marked(mark: str) -> None:
    """Kill all processes whose mark begins so, and return when there are none; blocks, so call it in a thread."""
    found: list[psutil.Process] = []
    for _ in range(ROUNDS):
        found = [process for process in psutil.process_iter() if _mark(process).startswith(mark)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(PAUSE)  # waiting for them by id would take the exit codes of those that asyncio waits for
    raise SandboxError(f"processes {[process.pid for process in found]} of a box do not end")


def _mark(process: psutil.Process) -> str:
    try:
        return process.environ().get(MARK, "")
    except (psutil.Error, OSError):
        return ""  # gone, a zombie, or somebody else's
