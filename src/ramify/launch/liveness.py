"""Whether a process still answers, and whether one that does not is stopped.

A process that is stopped (SIGSTOP, a debugger) or whose event loop hangs does not exit. The supervisor therefore sends
it requests, and kills it once it has not answered for too long; that is then handled like a crash.
"""

import asyncio
import time
from collections.abc import Callable

import psutil

from ramify.launch.process import ProcessState, SupervisedProcess
from ramify.launch.ready import is_responding

MAX_PROBE_INTERVAL = 5.0  # seconds for one answer, and between two requests
# Requests without an answer after which a process counts as silent. More than one, because a supervisor that was
# stopped itself finds an old request unanswered when it is continued.
MAX_UNANSWERED = 3


async def wait_for_silence(process: SupervisedProcess, on_change: Callable[[], None]) -> float:
    """Return the seconds for which a process was silent, once they exceed its `hang_timeout`.

    `changed` is called whenever the process becomes silent or answers again.
    """
    entry = process.spec
    assert entry.hang_timeout is not None
    pause = min(
        entry.hang_timeout / (4 * MAX_UNANSWERED), MAX_PROBE_INTERVAL
    )  # silence is shown at half of the timeout
    unanswered, since = 0, time.monotonic()
    while True:
        await asyncio.sleep(pause)
        asked = time.monotonic()
        if await is_responding(entry.address, timeout=pause):
            unanswered = 0
        else:
            unanswered += 1
            since = asked if unanswered == 1 else since
        state = ProcessState.SILENT if unanswered >= MAX_UNANSWERED else ProcessState.READY
        if process.state is not state and process.state is not ProcessState.ENDED:
            process.state, process.state_since = state, time.monotonic()
            on_change()
        silence = time.monotonic() - since
        if unanswered >= MAX_UNANSWERED and silence >= entry.hang_timeout:
            return silence


def get_process_state(pid: int) -> str:
    """Return `stopped`, `running` or `gone`."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "stopped"
    return "gone" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else "running"
