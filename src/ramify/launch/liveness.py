"""Detects processes that no longer answer.

A process that is stopped (SIGSTOP, a debugger) or whose event loop hangs does not exit. The supervisor therefore sends
it requests, and kills it after it has not answered for too long; that is then handled like a crash.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from ramify.launch.process import SupervisedProcess, is_responding
from ramify.run.state import ProcessState

# Unanswered requests after which a process counts as silent. More than one, because a supervisor that was stopped
# itself finds an old request unanswered when it is continued.
MAX_UNANSWERED = 3


async def wait_for_silence(
    process: SupervisedProcess, on_change: Callable[[], Awaitable[None]], *, max_interval: float
) -> float:
    """Wait until a process has not answered for its `hang_timeout`, and return the seconds since its last answer.

    `on_change` is called whenever the process becomes silent or answers again. `max_interval` limits the seconds
    between two requests, and the timeout of each.
    """
    address, hang_timeout = process.address, process.spec.hang_timeout
    assert hang_timeout is not None
    # A process is shown as silent after half of the timeout.
    interval = min(hang_timeout / (4 * MAX_UNANSWERED), max_interval)
    num_unanswered, silent_since = 0, time.monotonic()
    while True:
        await asyncio.sleep(interval)
        requested_at = time.monotonic()
        if await is_responding(address, timeout=interval):
            num_unanswered = 0
        else:
            num_unanswered += 1
            silent_since = requested_at if num_unanswered == 1 else silent_since
        is_silent = num_unanswered >= MAX_UNANSWERED
        state = ProcessState.SILENT if is_silent else ProcessState.READY
        if process.state is not state and process.state is not ProcessState.ENDED:
            process.set_state(state)
            await on_change()
        silent_seconds = time.monotonic() - silent_since
        if is_silent and silent_seconds >= hang_timeout:
            return silent_seconds


async def watch_reachability(
    process: SupervisedProcess, on_change: Callable[[], Awaitable[None]], *, interval: float
) -> None:
    """Set the state of a process to SILENT while a node of it cannot be reached. Runs until it is cancelled.

    `on_change` is called whenever the state changes. The process is not killed: its node does that when the lease ends.
    """
    while True:
        await asyncio.sleep(interval)
        state = ProcessState.SILENT if process.unreachable_node else ProcessState.READY
        if process.state is not state and process.state is not ProcessState.ENDED:
            process.set_state(state)
            await on_change()
