"""Small programs that stand for the processes of a run, and ways to see what is left of them."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from ramify.launch.process import ProcessRole, ProcessSpec
from tests.processes import runs

FOR_EVER = "import signal; signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\nwhile 1: signal.pause()"
)


def entry(folder: Path, name: str, code: str, role: ProcessRole = ProcessRole.SERVICE, **more) -> ProcessSpec:
    """A process that runs `code`; `DIR` in it is the folder, and it writes its id to `NAME.pids` when it begins."""
    begin = f"import os, sys; DIR = {str(folder)!r}; open(DIR + '/{name}.pids', 'a').write(str(os.getpid()) + chr(10))"
    return ProcessSpec(name, (sys.executable, "-S", "-c", f"{begin}\n{code}"), folder / f"{name}.log", role, **more)


def pids(folder: Path, name: str) -> list[int]:
    """The processes that have run under this name, in order."""
    path = folder / f"{name}.pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def alive(folder: Path) -> list[int]:
    """Those of all names that are still there."""
    found = [pid for path in folder.glob("*.pids") for pid in pids(folder, path.stem)]
    return [pid for pid in found if runs(pid)]


def until(true: Callable[[], object], *, seconds: float = 20.0) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)
