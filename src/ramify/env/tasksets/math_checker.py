"""Compares mathematical answers with math-verify in a process of its own, because a comparison may never return.

A reply such as \\boxed{9^{9^{9^9}}} makes sympy compute without end in one C function, which neither another thread nor
a signal handler can interrupt. So each comparison has an alarm without a handler: when it goes off, the system ends the
process. The next comparison starts another one. Requests and answers are numbered, and the library cannot write to the
pipe of the answers, so an answer never belongs to another reply.
"""

import contextlib
import functools
import json
import logging
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from importlib import import_module

from ramify.core.errors import DeadlineExceeded, EnvironmentFault

COMPARE_SECONDS = 5.0  # the most seconds of one comparison, of CPU time: a busy machine changes no reward
START_SECONDS = 120.0  # to import sympy
GRACE_SECONDS = 60.0  # beyond them, of wall time, until the process is killed
QUEUE_SECONDS = 600.0  # to wait for the comparisons of other threads
MAX_MEMORY_BYTES = 4 << 30


class MathChecker:
    """A process that compares answers one after another, each within `seconds` of CPU time; it ends with its owner."""

    def __init__(self, seconds: float = COMPARE_SECONDS) -> None:
        self._seconds, self._lock = seconds, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._num_requests = 0

    def compare(self, expected: str, reply: str) -> bool | None:
        """Return whether math-verify finds the value of `expected` in the reply; None if it cannot say in time.

        Raises EnvironmentFault if math-verify does not start, and DeadlineExceeded if too many threads wait for it.
        """
        if not self._lock.acquire(timeout=QUEUE_SECONDS):
            raise DeadlineExceeded(f"a comparison with math-verify waited longer than {QUEUE_SECONDS:g} s for others")
        try:
            process = self._send([expected, reply, self._seconds])
            line = _read_line(process, self._seconds + GRACE_SECONDS)
            number, is_equal = json.loads(line) if line else (None, None)
            if number != self._num_requests:
                self._stop()
                return None
            return is_equal
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _send(self, request: list[object]) -> "subprocess.Popen[bytes]":
        """Send a request to the process, which is started or replaced if necessary, and return the process."""
        self._num_requests += 1
        line = json.dumps([self._num_requests, *request]).encode() + b"\n"
        if self._process is not None:
            try:
                return _write(self._process, line)
            except OSError:  # it has ended since the last answer
                self._stop()
        self._process = self._start()
        try:
            return _write(self._process, line)
        except OSError as error:
            self._stop()
            raise EnvironmentFault(f"math-verify ended as soon as it had started: {error}") from error

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "ramify.env.tasksets.math_checker"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if not _read_line(process, START_SECONDS):
            _end(process)
            raise EnvironmentFault(f"math-verify could not be started; expected it to work in {sys.prefix}")
        return process

    def _stop(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None


@functools.cache
def get_math_checker() -> MathChecker:
    """Return the checker that all tasksets of this process share."""
    return MathChecker()


def _write(process: "subprocess.Popen[bytes]", line: bytes) -> "subprocess.Popen[bytes]":
    """Write a line to a process, and return the process. Raises OSError if it has ended."""
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()
    return process


def _read_line(process: "subprocess.Popen[bytes]", seconds: float) -> bytes:
    """Return the next line of a process; empty if it has ended, or writes none in time."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        return process.stdout.readline() if selector.select(seconds) else b""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and close its pipes."""
    assert process.stdin is not None and process.stdout is not None
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(OSError):  # what was not sent is lost
        process.stdin.close()


def main() -> None:
    """Answer requests on the standard input until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints goes to the standard error
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner
    logging.disable()  # math-verify warns that its own timeouts are off
    library = import_module("math_verify")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        number, expected, reply, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        expected = library.parse(f"\\boxed{{{expected}}}", parsing_timeout=None)
        answer = library.parse(reply, parsing_timeout=None)
        is_equal = bool(library.verify(expected, answer, timeout_seconds=None))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([number, is_equal]), file=answers, flush=True)


if __name__ == "__main__":
    main()
