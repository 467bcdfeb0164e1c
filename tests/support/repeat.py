"""Repeats a failed test once, alone, at the end: one race must not hide the results of all other tests.

With `--repeat-failed`, a failed test runs again in a process of its own, after all others. If it passes, it does not
fail the run, and the last lines name it. `tests/UNSTABLE.md` lists the tests with a known race. The run fails all the
same if

- the test is marked `promise`: it is not repeated,
- more than MAX_REPEATED tests passed only when repeated,
- the list says that the race of such a test is `fixed`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

MAX_REPEATED = 2
MAX_FAILED = 10  # if more tests fail, this is not a race, and none is repeated
LIST = Path("tests", "UNSTABLE.md")
STATUSES = ("open", "fixed")


def read_unstable_tests(text: str) -> dict[str, str]:
    """Return the status of each test in the table of `tests/UNSTABLE.md`."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    statuses = {row[0].strip("`"): row[-1] for row in rows if row[0].startswith("`")}
    for test, status in statuses.items():
        if status not in STATUSES:
            raise ValueError(f"{LIST}: the status of {test} is {status!r}; expected one of {', '.join(STATUSES)}")
    return statuses


class Repeater:
    """Collects failures, repeats them at the end of the session and decides whether the run has failed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failures: dict[str, list[pytest.TestReport]] = {}  # that may be repeated
        self._has_other_failures = False
        self._repeated: list[str] = []  # tests that passed when repeated
        self._lines: list[str] = []
        list_file = config.rootpath / LIST
        self._statuses = read_unstable_tests(list_file.read_text()) if list_file.exists() else {}

    def pytest_collectreport(self, report):
        self._has_other_failures |= report.failed

    def pytest_runtest_logreport(self, report):
        if not report.failed:
            return
        # For a crashed worker xdist reports a failure in no phase.
        if "promise" in report.keywords or report.when not in ("setup", "call", "teardown"):
            self._has_other_failures = True
        else:
            self._failures.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(trylast=True)  # after the workers have ended
    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not self._failures:
            return
        if len(self._failures) > MAX_FAILED:
            self._lines.append(f"{len(self._failures)} tests failed: too many to repeat them.")
            return
        self._repeated = [test for test in self._failures if self._passes_alone(test)]
        self._move_reports()
        problems = self._find_problems()
        self._lines += [*(self._describe(test) for test in self._repeated), *problems]
        if not problems and not self._has_other_failures and len(self._repeated) == len(self._failures):
            session.testsfailed = 0
            session.exitstatus = pytest.ExitCode.OK

    def _passes_alone(self, test: str) -> bool:
        timeout = getattr(self._config.option, "timeout", None)
        options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *(["--timeout", str(timeout)] if timeout else [])]
        command = [sys.executable, "-m", "pytest", *options, test]
        run_limit = self._config.pluginmanager.get_plugin("run_limit")
        seconds_left = 0.9 * run_limit.seconds_left if run_limit else None
        try:
            done = subprocess.run(command, cwd=self._config.rootpath, capture_output=True, timeout=seconds_left)
        except subprocess.TimeoutExpired:  # the run has no time left to wait for it
            run_limit.must_sweep = True
            return False
        return done.returncode == 0

    def _move_reports(self) -> None:
        """Count tests that passed when repeated as `repeated`, in place of `failed` and `error`."""
        stats = self._config.pluginmanager.get_plugin("terminalreporter").stats
        for outcome in ("failed", "error"):
            stats[outcome] = [report for report in stats.pop(outcome, []) if report.nodeid not in self._repeated]
        stats["repeated"] = [self._failures[test][0] for test in self._repeated]

    def _find_problems(self) -> list[str]:
        fixed = [test for test in self._repeated if self._status_of(test) == "fixed"]
        problems = [f"FAILED: {LIST} says that the race of {test} is fixed." for test in fixed]
        if len(self._repeated) > MAX_REPEATED:
            problems.append(
                f"FAILED: {len(self._repeated)} tests passed only when repeated; at most {MAX_REPEATED} may do so."
            )
        return problems

    def _status_of(self, test: str) -> str | None:
        return self._statuses.get(test, self._statuses.get(test.split("[")[0]))

    def _describe(self, test: str) -> str:
        line = f"repeated: {test} failed, and passed when it ran alone."
        if self._status_of(test) is None:
            return f"{line} Add to {LIST}:\n| `{test.split('[')[0]}` | cause unknown | open |"
        return line

    def pytest_terminal_summary(self, terminalreporter):
        """Show the first failure of each repeated test."""
        for test in self._repeated:
            for report in self._failures[test]:
                terminalreporter.section(f"{test}: {report.when} failed, then passed when repeated", "_")
                report.toterminal(terminalreporter._tw)

    def pytest_unconfigure(self, config):
        """Write the last lines of the output."""
        for line in self._lines:
            config.pluginmanager.get_plugin("terminalreporter").write_line(line)


def pytest_addoption(parser):
    parser.getgroup("ramify").addoption(
        "--repeat-failed", action="store_true", help="run a failed test once more, alone, unless it is a promise"
    )


def pytest_configure(config):
    if config.option.repeat_failed and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Repeater(config), "repeater")
