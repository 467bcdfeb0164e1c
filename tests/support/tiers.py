"""Test tiers: `unit` starts no process, `process` starts processes, `run` starts a whole run.

A test without a tier marker is a `unit` test. `pytest` without a path, `-m` or `-k` runs this tier, on several workers.
A `unit` test that starts a process fails.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path

import pytest

TIERS = ("unit", "process", "run")
MAX_WORKERS = 8  # of `pytest` alone; each worker imports the package and the tests
RUN_LIMIT = 600.0  # seconds for `pytest` alone
# Functions that start a process once. The last three are of libraries: matplotlib lists the fonts of a machine where it
# never ran, a torch for CUDA looks for libraries when it is imported, and `platform.platform()`, which openai calls for
# its headers, runs `uname -p`.
PROBES = {
    "find_cgroup_parents",
    "find_unsupported_reason",
    "load_c_library",
    "_get_fontconfig_fonts",
    "_findSoname_ldconfig",
    "from_subprocess",
}
START_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "multiprocessing.spawn"}


def get_tier(item: pytest.Item) -> str:
    """Return the tier of a test: the marker nearest to it, `unit` if there is none."""
    return next((mark.name for mark in item.iter_markers() if mark.name in TIERS), "unit")


def is_probing() -> bool:
    """Return whether the code that runs is a probe of the machine, whose result the process keeps."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name not in PROBES:
        frame = frame.f_back
    return frame is not None


class ProcessGuard:
    """Forbids a `unit` test to start a process, and remembers which fixtures start one.

    An audit hook sees every start, whichever library asks for it, and raises there. If the code under test catches the
    exception, or starts the process in another thread, the test fails afterwards.
    """

    def __init__(self) -> None:
        self._item: pytest.Item | None = None
        self._problem: str | None = None
        self._starts = 0
        self._process_fixtures: set[pytest.FixtureDef] = set()
        self._open_fixtures: set[pytest.FixtureDef] = set()

    def audit(self, event: str, arguments: tuple) -> None:
        """Raise if `event` is the start of a process by a `unit` test."""
        if event not in START_EVENTS or is_probing():
            return
        self._starts += 1
        if self._item is not None:
            command = arguments[1] if event == "subprocess.Popen" else event
            self._problem = self._describe(self._item, f"starts a process ({command!r})")
            raise pytest.fail.Exception(self._problem)

    def _describe(self, item: pytest.Item, fault: str) -> str:
        return (
            f"{item.nodeid} is a unit test and {fault}. Mark it with @pytest.mark.process, or with @pytest.mark.run "
            "if it starts a whole run; or test the same without a process."
        )

    @contextmanager
    def watch(self, item: pytest.Item) -> Iterator[None]:
        """Forbid processes during one phase of a test, if it is a `unit` test."""
        self._problem = None
        self._item = item if get_tier(item) == "unit" else None
        try:
            yield
        finally:
            self._item = None
        if self._problem is not None:
            pytest.fail(self._problem, pytrace=False)

    def check_fixtures(self, item: pytest.Item) -> None:
        """Fail a `unit` test that uses a shared fixture which another test has set up and which started a process."""
        definitions = item._fixtureinfo.name2fixturedefs.items() if isinstance(item, pytest.Function) else ()
        names = [name for name, fixtures in definitions if fixtures and fixtures[-1] in self._process_fixtures]
        if names and get_tier(item) == "unit":
            pytest.fail(self._describe(item, f"uses the fixture {names[0]!r}, which starts a process"), pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        starts = self._starts
        try:
            return (yield)
        finally:
            if self._starts > starts:
                self._open_fixtures.add(fixturedef)
                if fixturedef.scope != "function":
                    self._process_fixtures.add(fixturedef)

    def pytest_fixture_post_finalizer(self, fixturedef):
        self._open_fixtures.discard(fixturedef)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        with self.watch(item):
            yield
        self.check_fixtures(item)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item):
        with self.watch(item):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        if self._open_fixtures:  # shared ones, which the last test of a module closes, whatever its tier
            return (yield)
        with self.watch(item):
            return (yield)


def _audit_multiprocessing() -> None:
    """Report what multiprocessing starts, which is the only part of the standard library that does so unseen.

    Its resource tracker is not reported: it holds the names of semaphores and shared memory and computes nothing.
    """
    spawn = util.spawnv_passfds

    def spawn_audited(path, args, passfds):
        if not any("resource_tracker" in str(argument) for argument in args):
            sys.audit("multiprocessing.spawn", path)
        return spawn(path, args, passfds)

    util.spawnv_passfds = spawn_audited


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the tier `unit` on several workers, with repeats and a time limit, if the command line selects nothing."""
    option = config.option
    if config.args_source is not config.ArgsSource.TESTPATHS or option.markexpr or option.keyword:
        return
    option.markexpr = "unit"
    option.repeat_failed = True
    option.run_limit = option.run_limit or RUN_LIMIT
    is_worker = hasattr(config, "workerinput")  # which reads the same command line, and must not have workers itself
    if getattr(option, "numprocesses", 0) is None and not option.usepdb and not is_worker:
        option.numprocesses = min(os.cpu_count() or 1, MAX_WORKERS)


def pytest_configure(config):
    if Path("/dev/nvidiactl").exists():  # on a GPU, libraries compile kernels in processes of their own
        return
    guard = ProcessGuard()
    config.pluginmanager.register(guard, "process_guard")
    sys.addaudithook(guard.audit)
    _audit_multiprocessing()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark every test without a tier as `unit`, before `-m` selects."""
    for item in items:
        if not any(mark.name in TIERS for mark in item.iter_markers()):
            item.add_marker("unit")
