"""Compares mathematical answers with math-verify in a process of its own, because a comparison may never return.

A reply such as \\boxed{9^{9^{9^9}}} makes sympy compute without end in one C function, which neither another thread nor
a signal handler can interrupt. So each comparison has an alarm without a handler: when it goes off, the system ends the
process. The next comparison starts another one.
"""

import functools
import json
import logging
import resource
import select
import signal
import subprocess
import sys
import threading
from importlib import import_module

from ramify.errors import EnvironmentFault

COMPARE_SECONDS = 5.0  # the most seconds of one comparison, of CPU time: a busy machine changes no reward
START_SECONDS = 120.0  # to import sympy
GRACE_SECONDS = 60.0  # beyond them, of wall time, until the process is killed
MAX_MEMORY_BYTES = 4 << 30


class MathChecker:
    """A process that compares answers one after another, each within `seconds` of CPU time; it ends with its owner."""

    def __init__(self, seconds: float = COMPARE_SECONDS) -> None:
        self._seconds, self._lock = seconds, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def compare(self, expected: str, reply: str) -> bool | None:
        """Return whether math-verify finds the value of `expected` in the reply; None if it cannot say in time."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps([expected, reply, self._seconds]).encode() + b"\n")
            process.stdin.flush()
            line = _read_line(process, self._seconds + GRACE_SECONDS)
            if not line:
                self._stop()
            return json.loads(line) if line else None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "ramify.tasksets.math_checker"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if not _read_line(process, START_SECONDS):
            process.kill()
            raise EnvironmentFault(f"math-verify could not be started; expected it to work in {sys.prefix}")
        return process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@functools.cache
def get_math_checker() -> MathChecker:
    """Return the checker that all tasksets of this process share."""
    return MathChecker()


def _read_line(process: "subprocess.Popen[bytes]", seconds: float) -> bytes:
    """Return the next line of a process; empty if it has ended, or writes none in time."""
    assert process.stdout is not None
    is_readable, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if is_readable else b""


def main() -> None:
    """Answer requests on the standard input until it is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner
    logging.disable()  # math-verify warns that its own timeouts are off
    library = import_module("math_verify")
    print("ready", flush=True)
    for line in sys.stdin:
        expected, reply, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        expected = library.parse(f"\\boxed{{{expected}}}", parsing_timeout=None)
        answer = library.parse(reply, parsing_timeout=None)
        is_equal = bool(library.verify(expected, answer, timeout_seconds=None))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(is_equal), flush=True)


if __name__ == "__main__":
    main()
