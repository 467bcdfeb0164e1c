"""A time limit for a whole run of pytest: `--run-limit SECONDS`.

pytest-timeout ends a test that waits in Python. It cannot end one that hangs in C code, a worker that hangs between two
tests, or a collection that hangs. At the limit this plugin names the tests that are running, shows the stacks of their
processes, stops the session so that its results are still reported, and kills every process that the run has started.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
import uuid

import psutil
import pytest

RUN_VARIABLE = "RAMIFY_TEST_RUN"  # every process of a run inherits the run's name in it, also if its parent ends
REPORT_SECONDS = 30.0  # after the limit, for the session to write its results
EXIT_STATUS = 124  # if the session does not end by itself
INTERRUPT_INTERVAL = 5.0  # seconds between two interrupts of a session without workers


class RunLimit:
    """Ends a session at its time limit, and what its processes have left behind."""

    def __init__(self, config: pytest.Config, seconds: float) -> None:
        self._config, self._seconds = config, seconds
        self.report_seconds = REPORT_SECONDS
        self._stderr = os.dup(2)  # tests run with another one
        self._running: dict[str, float] = {}  # tests and when they started
        self.must_sweep = False
        self._is_interrupted, self._has_ended = threading.Event(), threading.Event()
        self._run_name = uuid.uuid4().hex
        os.environ[RUN_VARIABLE] = f"{os.environ.get(RUN_VARIABLE, '')}/{self._run_name}"
        self._deadline = time.monotonic() + seconds
        self._timer = threading.Timer(seconds, self.expire)
        self._timer.daemon = True
        self._timer.start()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def pytest_runtest_logstart(self, nodeid):
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        self._running.pop(nodeid, None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error):
        self.must_sweep |= error is not None

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self):
        self._is_interrupted.set()

    def pytest_unconfigure(self):
        self._timer.cancel()
        self._has_ended.set()
        if self.must_sweep:
            self._kill_processes()

    def expire(self) -> None:
        """Stop the session, and kill it with all its processes if it does not end, whatever fails in here."""
        self.must_sweep = True
        try:
            self._write(self._describe())
            self._stop_session()
        finally:
            if not self._has_ended.wait(self.report_seconds):
                try:
                    self._write("The session did not end; its processes are killed.\n")
                    self._kill_processes()
                finally:
                    os._exit(EXIT_STATUS)

    def _write(self, text: str) -> None:
        os.write(self._stderr, text.encode(errors="replace"))

    def _describe(self) -> str:
        now = time.monotonic()
        tests = [f"  {test} (for {now - start:.0f} s)" for test, start in self._running.copy().items()]
        header = f"\nThe run took longer than {self._seconds:.0f} s (--run-limit) and is stopped. "
        return header + "\n".join(["These tests were running:" if tests else "No test was running.", *tests]) + "\n"

    def _stop_session(self) -> None:
        session = self._config.pluginmanager.get_plugin("dsession")
        if session is None:
            faulthandler.dump_traceback(self._stderr)
            deadline = time.monotonic() + self.report_seconds
            while not self._is_interrupted.is_set() and (seconds := deadline - time.monotonic()) > 0:
                # Again, since one just before a system call does not interrupt it; but not while the first is handled.
                os.kill(os.getpid(), signal.SIGINT)
                self._is_interrupted.wait(min(INTERRUPT_INTERVAL, seconds))
            return
        # A worker that aborts shows its stacks. xdist reports its test as failed, and must not start another worker.
        session.shouldstop = "time limit of the run"
        session._max_worker_restart = 0
        for node in session._active_nodes.copy():  # the session's thread changes it
            with contextlib.suppress(psutil.Error):
                psutil.Process(node.gateway._io.popen.pid).send_signal(signal.SIGABRT)

    def _kill_processes(self) -> None:
        """Kill every process that the run has started, also if it has another parent by now."""
        started = {process for process in psutil.process_iter(["environ"]) if self._is_started_here(process)}
        for process in started.union(psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _is_started_here(self, process: psutil.Process) -> bool:
        environment = process.info["environ"] or {}
        return process.pid != os.getpid() and self._run_name in environment.get(RUN_VARIABLE, "")


def pytest_addoption(parser):
    parser.getgroup("ramify").addoption(
        "--run-limit", type=float, default=0, metavar="SECONDS", help="stop the whole run after this time"
    )


def pytest_configure(config):
    if config.option.run_limit and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunLimit(config, config.option.run_limit), "run_limit")
