"""Helpers for tests of launchers, whose processes may run on any node."""

import asyncio
import contextlib
import fcntl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from ramify.fencing.lease import LeaseTerms, RoleLeases, read_lease_clock
from ramify.fencing.token import FencingToken
from ramify.launch.launcher import Launcher, Placement, ProcessSlot, ProcessStart
from ramify.processes.log import ProcessLog

PYTHON = (sys.executable, "-S", "-c")
TIMEOUT = 60.0  # seconds for one test
PLACEMENT = Placement(num_cpus=0.1)


def build_leases(num_ranks: int = 1, terms: LeaseTerms | None = None) -> RoleLeases:
    return RoleLeases("role", FencingToken(), terms or LeaseTerms(), num_ranks=num_ranks, now=read_lease_clock())


@contextlib.asynccontextmanager
async def open_slots(launcher: Launcher, num_ranks: int = 1, placement: Placement | None = PLACEMENT):
    """Open slots, and stop them at the end."""
    terms = placement.lease if placement is not None else None
    slots = await launcher.open_slots(build_leases(num_ranks, terms), placement, timeout=TIMEOUT)
    try:
        yield slots
    finally:
        await asyncio.gather(*(slot.stop() for slot in slots))


@contextlib.asynccontextmanager
async def open_slot(launcher: Launcher, placement: Placement | None = PLACEMENT) -> AsyncIterator[ProcessSlot]:
    async with open_slots(launcher, placement=placement) as (slot,):
        yield slot


async def start_code(slot: ProcessSlot, code: str, log: ProcessLog, **more) -> None:
    """Start a Python program in a slot."""
    await slot.start(ProcessStart((*PYTHON, code), **more), log)


async def wait_for_line(log: ProcessLog, line: str) -> None:
    """Wait until a program has printed a line."""
    while line not in log.tail(None).splitlines():
        await asyncio.sleep(0.01)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file. A pid would not do: it is that of another node."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def daemon_code(lock: Path) -> str:
    """Return code that starts a daemon in its own session, which holds a lock and ignores SIGTERM."""
    daemon = (
        f"import fcntl, signal; signal.signal(15, signal.SIG_IGN); file = open({str(lock)!r}, 'a'); "
        "fcntl.flock(file, fcntl.LOCK_EX); print('locked', flush=True)\nwhile 1: signal.pause()"
    )
    return f"""
import signal, subprocess, sys
daemon = subprocess.Popen([sys.executable, "-S", "-c", {daemon!r}], start_new_session=True, stdout=subprocess.PIPE)
daemon.stdout.readline()
print("up", flush=True)
"""
