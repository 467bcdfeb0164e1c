"""Runs another program with a timeout and returns its output.

A program may hang, and so may the processes that it started: if only the child is killed, they keep running with its
pipes open. So each program runs in its own session, and the whole session is killed on a timeout.
"""

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ramify.processes.cleanup import kill_process_group


class ProgramResult(NamedTuple):
    """The output of the program if `ok`, else the reason of the failure, which does not name the program."""

    ok: bool
    text: str
    returncode: int | None = None  # None if it was not started or timed out
    stderr: str = ""  # if it failed


def run_program(command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None) -> ProgramResult:
    """Run `command` for at most `timeout` seconds. Never raises: a failure is a result, too."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            env=env,
        )
    except OSError as error:
        return ProgramResult(False, f"cannot be started: {error.strerror}")
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return ProgramResult(False, f"timed out after {timeout:g} s")
    finally:
        _kill_session(process)
    if process.returncode == 0:
        return ProgramResult(True, stdout.strip())
    lines = (stderr.strip() or stdout.strip()).splitlines()
    text = lines[-1] if lines else f"exit code {process.returncode}"
    return ProgramResult(False, text, process.returncode, stderr.strip())


def _kill_session(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        kill_process_group(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
