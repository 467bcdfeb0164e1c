"""A plugin of pytest that reports the outcome of every test. It runs in the sandbox of the rewards, without Ramify.

Standard input has two lines: the nonce, and the path of a file for the reports. A report is a line
{"nonce", "id", "outcome"} of this file. It must work with the Python and the pytest of old images.

Code under test runs in the same process. If it replaces the functions of pytest that decide on outcomes, tests are
reported as "tampered".
"""

import json
import os
from typing import Any

from _pytest import python, reports, runner


def open_reports() -> "tuple[str, int]":
    """Return the nonce and a file descriptor for the reports; -1 in a process that should not report.

    It runs when the module is imported: later, pytest has replaced standard input.
    """
    if not os.environ.pop("RAMIFY_TEST_REPORTS", ""):
        return "", -1
    with os.fdopen(os.dup(0), "rb") as stdin:
        nonce, path = (stdin.readline().decode().rstrip("\n") for _ in range(2))
    return nonce, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def get_functions() -> "list[tuple[str, Any, Any]]":
    """Return what decides on outcomes: the names of pytest's modules and classes with their values and code."""
    owners = (runner, python, reports, runner.CallInfo, python.Function, reports.TestReport)
    return [
        (name, value, getattr(value, "__code__", None))
        for owner in owners
        for name, value in sorted(vars(owner).items())
        if callable(getattr(value, "__func__", value)) or isinstance(value, property)
    ]


NONCE, REPORT_FD = open_reports()
FUNCTIONS = []  # type: list[tuple[str, Any, Any]]
OUTCOMES = {}  # type: dict[str, str]


def pytest_load_initial_conftests() -> None:
    """Remember pytest's functions: installed plugins have been loaded, files of the repository have not."""
    FUNCTIONS[:] = get_functions()


def pytest_runtest_logreport(report: Any) -> None:
    """Remember the worst outcome of the phases of a test, and report it after the last one."""
    if report.outcome != "passed" or report.nodeid not in OUTCOMES:
        OUTCOMES[report.nodeid] = report.outcome
    if report.when == "teardown" and REPORT_FD >= 0:
        outcome = OUTCOMES[report.nodeid] if get_functions() == FUNCTIONS else "tampered"
        line = json.dumps({"nonce": NONCE, "id": report.nodeid, "outcome": outcome})
        os.write(REPORT_FD, line.encode() + b"\n")
