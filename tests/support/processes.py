"""Free ports, waits with a deadline, and processes that end or remain."""

import asyncio
import contextlib
import inspect
import json
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ramify.core.errors import Failure, RamifyError
from ramify.launch.launcher import ProcessRole, ProcessSpec, ProcessStart
from ramify.processes.log import FAILURE_PREFIX

TIMEOUT = 60.0  # seconds for one wait
POLL_INTERVAL = 0.01
PORTS = range(10_000, 20_000)  # below the ephemeral ports of the system, and below the ports that a run reserves

# Programs for `python -c`.
RUNS_FOREVER = "import signal; signal.pause()"
IGNORES_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ignoring", flush=True)
while 1: signal.pause()
"""


def find_free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    for port in random.sample(PORTS, 100):
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port
    raise AssertionError("no port is free")


# -- waits ----------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], Any], what: str = "the condition", *, timeout: float = TIMEOUT) -> Any:
    """Poll a condition until it is true, and return its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(POLL_INTERVAL)
    return value


async def async_wait_until(
    condition: Callable[[], Any], what: str = "the condition", *, timeout: float = TIMEOUT
) -> Any:
    """Poll a condition, which may be a coroutine function, until it is true, and return its value."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        await asyncio.sleep(POLL_INTERVAL)


# -- processes ------------------------------------------------------------------------------------------------------


def is_running(process: int | psutil.Process) -> bool:
    """Return whether a process exists and has not ended. A zombie has ended."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def list_descendants(pid: int) -> list[psutil.Process]:
    """Return the processes that a process started, directly or not."""
    return psutil.Process(pid).children(recursive=True)


def wait_until_ended(*processes: int | psutil.Process) -> None:
    wait_until(lambda: not any(map(is_running, processes)), f"the end of {processes}")


async def async_wait_until_ended(processes: Iterable[int | psutil.Process], what: str) -> None:
    await async_wait_until(lambda: not any(map(is_running, processes)), f"the end of {what}")


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants at once, as a power failure does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        victims = [psutil.Process(pid), *list_descendants(pid)]
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # stopped, no process notices the death of another
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(signum)


# -- processes of a run that note their pids ------------------------------------------------------------------------


def build_spec(directory: Path, name: str, code: str, role: ProcessRole = ProcessRole.SERVICE, **more) -> ProcessSpec:
    """Return a process that appends its pid to `NAME.pids` and runs `code`, in which `DIR` is the directory."""
    prologue = (
        f"import os, sys; DIR = {str(directory)!r}; open(DIR + '/{name}.pids', 'a').write(str(os.getpid()) + chr(10))"
    )
    start = ProcessStart((sys.executable, "-S", "-c", f"{prologue}\n{code}"), address=more.get("address", ""))
    return ProcessSpec(name, directory / f"{name}.log", more.pop("build_start", lambda _: start), role, **more)


def read_pids(directory: Path, name: str = "*") -> list[int]:
    """Return the pids of the processes with this name, or of all, in the order of their starts."""
    return [int(line) for path in directory.glob(f"{name}.pids") for line in path.read_text().split()]


def list_running(directory: Path) -> list[int]:
    """Return the pids of all processes that still run."""
    return [pid for pid in read_pids(directory) if is_running(pid)]


def fails_with(failure: RamifyError) -> str:
    """Return code of a child process that reports a failure and exits."""
    plain = msgspec.to_builtins(Failure.from_exception(failure))
    return f"import sys; print({FAILURE_PREFIX + json.dumps(plain)!r}); sys.exit(1)"
