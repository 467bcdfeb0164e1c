"""A plugin of pytest that reports the outcome of every test. It runs in the box of the rewards, without Ramify.

The nonce is the first line of standard input. A report is a line {"nonce", "id", "outcome"} on standard output; what
tests print goes to standard error. It must work with the Python and the pytest of old images.
"""

import json
import os
from typing import Any

NONCE_BYTES = 32


def open_reports() -> "tuple[str, int]":
    """Return the nonce and a file descriptor for the reports; -1 in a process that should not report.

    It runs when the module is imported: later, pytest has replaced standard output.
    """
    if not os.environ.pop("RAMIFY_TEST_REPORTS", ""):
        return "", -1
    nonce = os.read(0, NONCE_BYTES).decode()
    report_fd = os.dup(1)
    os.dup2(2, 1)
    return nonce, report_fd


NONCE, REPORT_FD = open_reports()
OUTCOMES = {}  # type: dict[str, str]


def pytest_runtest_logreport(report: Any) -> None:
    """Remember the worst outcome of the phases of a test, and report it after the last one."""
    if report.outcome != "passed" or report.nodeid not in OUTCOMES:
        OUTCOMES[report.nodeid] = report.outcome
    if report.when == "teardown" and REPORT_FD >= 0:
        line = json.dumps({"nonce": NONCE, "id": report.nodeid, "outcome": OUTCOMES[report.nodeid]})
        os.write(REPORT_FD, line.encode() + b"\n")
