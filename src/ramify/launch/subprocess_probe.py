"""Ask another program a question, with a deadline that holds.

A program may hang, and so may what it started: killing only the child leaves the rest running with our pipes open. So
each question runs in a session of its own, and the whole session ends with it when time is up.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import NamedTuple


class ProbeResult(NamedTuple):
    """What the program printed, or why there is no answer."""

    ok: bool
    text: str


def run_probe(command: Sequence[str], *, timeout: float) -> ProbeResult:
    """Run `command` for at most `deadline` seconds; every outcome is an answer."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return ProbeResult(False, f"{command[0]} cannot be started: {error.strerror}")
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return ProbeResult(False, f"no answer within {timeout:g} s")
    finally:
        _kill_session(process)
    if process.returncode == 0:
        return ProbeResult(True, out.strip())
    lines = (err.strip() or out.strip()).splitlines()
    return ProbeResult(False, lines[-1] if lines else f"exit code {process.returncode}")


def _kill_session(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
