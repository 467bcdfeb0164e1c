"""The replies of a trace, gold replies with tool calls, and the comparison of final answers in \\boxed{}."""

import contextlib
import functools
import json
import logging
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import ramify as rf
from ramify.core.errors import DeadlineExceeded, EnvironmentFault

COMPARE_SECONDS = 5.0  # the most seconds of one comparison, of CPU time: a busy machine changes no reward
START_SECONDS = 120.0  # to import sympy
GRACE_SECONDS = 60.0  # beyond them, of wall time, until the process is killed
QUEUE_SECONDS = 600.0  # to wait for the comparisons of other threads
MAX_MEMORY_BYTES = 4 << 30


class MathChecker:
    """A process that compares answers with math-verify, each within `seconds` of CPU time; it ends with its owner.

    A reply such as \\boxed{9^{9^{9^9}}} makes sympy compute without end in one C function, which neither another thread
    nor a signal handler can interrupt. So each comparison has an alarm without a handler: when it goes off, the system
    ends the process, and the next comparison starts another one. Requests and answers are numbered.
    """

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
        command = [sys.executable, "-m", "ramify.env.tasksets.answers"]
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


BOXED_PREFIX = "\\boxed{"
MAX_ANSWER_CHARS = 200  # longer answers are not parsed as numbers or by math_verify

_SPACING = re.compile(r"\\[,;:! ]|\\left|\\right|\\displaystyle|[\s$]|\\\$")
_UNIT = re.compile(r"\\(?:text|mbox|mathrm)\{[^{}]*\}|\\?%|\^\{?\\circ\}?|\.$")
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_NUMBER = re.compile(r"[+-]?(?:\d+/\d+|\d+\.?\d*|\.\d+)")  # no exponents: 1e999999999 would be computed


def get_replies(trace: rf.Trace) -> list[str]:
    """Return the text of every reply, in order.

    Only the path to the newest node is read: a trace holds a reply twice if the chat template rewrites history.
    """
    messages = rf.Branch(trace, len(trace.nodes) - 1).messages if len(trace.nodes) else []
    return [message.text for message in messages if message.role == "assistant"]


def build_tool_call_replies(calls: Iterable[tuple[str, dict[str, Any]]]) -> list[rf.Message]:
    """Return one gold reply for each call, given as (tool, arguments)."""
    return [
        rf.Message("assistant", tool_calls=(rf.ToolCall(f"gold{number}", name, json.dumps(arguments)),))
        for number, (name, arguments) in enumerate(calls)
    ]


def extract_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}`, up to the matching brace; None without a closed one."""
    start = text.rfind(BOXED_PREFIX)
    depth = 0
    for index in range(start + len(BOXED_PREFIX) - 1, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len(BOXED_PREFIX) : index].strip()
    return None


def is_same_value(answer: str, expected: str) -> bool:
    """Return whether two answers are equal as text, as numbers, or by `math_verify` if it is installed."""
    first, second = _strip_formatting(answer), _strip_formatting(expected)
    if first == second:
        return bool(first)
    number, expected_number = parse_number(first), parse_number(second)
    if number is not None and expected_number is not None:
        return number == expected_number
    return _math_verify_agrees(answer, expected)


def parse_number(text: str) -> Fraction | None:
    """Parse a rational number such as 1,200 or 3/4 or 0.75 or \\frac{3}{4}; return None if the text is none."""
    plain = _FRACTION.sub(r"\1\2/\3", _GROUPED.sub("", _strip_formatting(text)))
    if len(plain) > MAX_ANSWER_CHARS or not _NUMBER.fullmatch(plain):
        return None
    try:
        return Fraction(plain)
    except ZeroDivisionError:
        return None


def _strip_formatting(text: str) -> str:
    """Remove what does not change a value: spaces, dollar signs, a unit, a final dot."""
    return _UNIT.sub("", _SPACING.sub("", text))


def _math_verify_agrees(answer: str, expected: str) -> bool:
    if find_spec("math_verify") is None or max(len(answer), len(expected)) > MAX_ANSWER_CHARS:
        return False
    return get_math_checker().compare(expected, f"\\boxed{{{answer}}}") or False
