"""Small programs that stand for the processes of a run, and helpers that find the processes that remain."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from ramify.launch.process import ProcessRole, ProcessSpec
from tests.process_checks import runs

RUNS_FOREVER = "import signal; signal.pause()"
IGNORES_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ignoring", flush=True)
while 1: signal.pause()
"""


def build_spec(directory: Path, name: str, code: str, role: ProcessRole = ProcessRole.SERVICE, **more) -> ProcessSpec:
    """Return a process that appends its pid to `NAME.pids` and runs `code`, in which `DIR` is the directory."""
    prologue = (
        f"import os, sys; DIR = {str(directory)!r}; open(DIR + '/{name}.pids', 'a').write(str(os.getpid()) + chr(10))"
    )
    return ProcessSpec(
        name, (sys.executable, "-S", "-c", f"{prologue}\n{code}"), directory / f"{name}.log", role, **more
    )


def pids(directory: Path, name: str) -> list[int]:
    """Return the pids of the processes with this name, in the order of their starts."""
    path = directory / f"{name}.pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def alive(directory: Path) -> list[int]:
    """Return the pids of all processes that still run."""
    started = [pid for path in directory.glob("*.pids") for pid in pids(directory, path.stem)]
    return [pid for pid in started if runs(pid)]


def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.01)
