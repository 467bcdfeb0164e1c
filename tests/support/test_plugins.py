"""Tiers, repeated tests, crashed workers and the time limit, each tried in a small project of its own.

Nearly all of the cost is the start of pytest and its workers, half a second of CPU each: tests use one worker where two
would prove nothing more, and all but three tests are `full`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import is_running, wait_until

pytestmark = pytest.mark.process

STARTS_PYTEST = pytest.mark.full("starts pytest and its workers")
ROOT = Path(__file__).parents[2]
CONFTEST = """
pytest_plugins = [f"tests.support.{name}" for name in ("tiers", "scheduling", "repeat", "run_limit")]
"""
SETTINGS = """
[pytest]
testpaths = tests
addopts = --import-mode=importlib --strict-markers
markers =
    unit
    process
    run
    promise
"""
RACE = """
import pathlib
import pytest

def fail_the_first_time(name):
    path = pathlib.Path(name)
    if not path.exists():
        path.touch()
        raise AssertionError("lost the race")
"""


class Project:
    """A folder with tests that use the plugins of this project."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("conftest.py", CONFTEST)
        self.write("pytest.ini", SETTINGS)

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def read(self, path: str) -> str:
        return (self.folder / path).read_text()

    def pytest(self, *arguments: str) -> tuple[int, str]:
        """Return the exit status and the output of pytest, which loads no plugins but those that are needed."""
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p xdist.plugin -p no:cacheprovider",
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-rA", *arguments],
            cwd=self.folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        return done.returncode, done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


STARTS = """
import asyncio, multiprocessing, os, subprocess, threading
import pytest

@pytest.fixture
def cleanup():
    yield
    subprocess.run(["true"])

def test_teardown(cleanup):
    pass

def test_popen():
    subprocess.run(["true"])

def test_fork():
    os.fork()

def test_spawn():
    multiprocessing.get_context("spawn").Process(target=print).start()

def test_asyncio():
    asyncio.run(asyncio.create_subprocess_exec("true"))

def test_thread():
    thread = threading.Thread(target=lambda: subprocess.run(["true"]))
    thread.start()
    thread.join()

def test_exception_is_caught():
    try:
        subprocess.run(["true"])
    except BaseException:
        pass

@pytest.fixture(scope="module")
def server():
    subprocess.run(["true"])

@pytest.mark.process
def test_process(server):
    subprocess.run(["true"])

def test_shared_fixture(server):
    pass

def test_unit():
    multiprocessing.Semaphore()
"""


def test_unit_test_that_starts_a_process_fails(project):
    project.write("tests/test_starts.py", STARTS)
    status, output = project.pytest("tests", "-W", "ignore")
    assert status == 1
    passed = {line.split("::")[1] for line in output.splitlines() if line.startswith("PASSED")}
    assert passed == {"test_process", "test_unit", "test_teardown"}
    assert "test_popen is a unit test and starts a process" in output and "@pytest.mark.process" in output
    assert "uses the fixture 'server', which starts a process" in output
    assert "ERROR tests/test_starts.py::test_teardown" in output


@STARTS_PYTEST
def test_pytest_alone_runs_unit_tests_on_workers(project):
    project.write("conftest.py", CONFTEST + "import os; os.cpu_count = lambda: 1")
    text = "import os, pathlib, pytest\n"
    for tier in ("unit", "process", "run"):
        text += f"@pytest.mark.{tier}\ndef test_{tier}(): pass\n"
    text += "def test_worker(): pathlib.Path('worker').write_text(os.environ['PYTEST_XDIST_WORKER'])\n"
    project.write("tests/test_tiers.py", text)
    _, output = project.pytest()
    assert "2 passed" in output and "PASSED tests/test_tiers.py::test_unit" in output
    assert project.read("worker") == "gw0"
    _, output = project.pytest("-n", "0", "-m", "process or run")
    assert "2 passed, 2 deselected" in output


def write_races(project: Project, *names: str, marker: str = "unit") -> None:
    tests = "".join(f"@pytest.mark.{marker}\ndef test_{name}(): fail_the_first_time('{name}')\n" for name in names)
    project.write("tests/test_races.py", RACE + tests + "def test_other(): pass\n")


def test_a_race_is_repeated_and_named_in_the_last_lines(project):
    write_races(project, "one")
    status, output = project.pytest("--repeat-failed", "-n", "0", "tests")
    assert status == 0 and "1 passed, 1 repeated" in output and "AssertionError: lost the race" in output
    assert output.splitlines()[-2:] == [
        "repeated: tests/test_races.py::test_one failed, and passed when it ran alone. Add to tests/UNSTABLE.md:",
        "| `tests/test_races.py::test_one` | cause unknown | open |",
    ]


@STARTS_PYTEST
def test_more_than_two_races_and_one_that_is_listed_as_fixed_fail_the_run(project):
    write_races(project, "one", "two", "three")
    rows = ["| test | cause | status |", "|---|---|---|", "| `tests/test_races.py::test_one` | the port | fixed |"]
    project.write("tests/UNSTABLE.md", "\n".join([*rows, "| `tests/test_races.py::test_three` | x | open |"]))
    status, output = project.pytest("--repeat-failed", "tests")
    assert status == 1 and "3 repeated" in output
    assert output.splitlines()[-3:] == [
        "repeated: tests/test_races.py::test_three failed, and passed when it ran alone.",
        "FAILED: tests/UNSTABLE.md says that the race of tests/test_races.py::test_one is fixed.",
        "FAILED: 3 tests passed only when repeated; at most 2 may do so.",
    ]


@STARTS_PYTEST
def test_a_promise_and_a_broken_test_fail_the_run(project):
    write_races(project, "promise", marker="promise")
    project.write("tests/test_broken.py", "def test_broken(): assert False")
    status, output = project.pytest("--repeat-failed", "tests")
    assert status == 1 and "2 failed, 1 passed" in output and "repeated" not in output


CRASH = """
import ctypes, os, pathlib, signal, pytest

pytestmark = pytest.mark.process

def test_before(): pass

def test_crash():
    child = os.fork()
    if not child: signal.pause()
    pathlib.Path("{name}").write_text(str(child))
    {crash}

def test_after(): pass
"""


@STARTS_PYTEST
def test_a_crashed_worker_fails_the_run_with_the_name_of_its_test(project):
    """A process that the worker has forked lives on: it must not hide the crash.

    All other tests run, also those in `infer`, which only one of two workers collects.
    """
    for path in ("infer/test_heavy", "test_1", "test_2"):
        project.write(f"tests/{path}.py", "def test_one(): pass\ndef test_two(): pass\n")
    crashes = {"segfault": "ctypes.string_at(0)", "exit": "os._exit(0)"}
    for name, crash in crashes.items():
        project.write(f"tests/test_9_{name}.py", CRASH.format(name=name, crash=crash))
    status, output = project.pytest("-n", "2", "--repeat-failed", "--run-limit", "200", "tests")
    assert status == 1 and "2 failed, 10 passed" in output
    for name in crashes:
        assert f"crashed while running 'tests/test_9_{name}.py::test_crash'" in output
        wait_until(lambda name=name: not is_running(int(project.read(name))))


HANG = """
import os, pathlib, signal, subprocess, time
import pytest

pytestmark = pytest.mark.process

def test_before(): pass

def test_hang():
    child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $! > left_behind.new; mv left_behind.new left_behind"])
    child.wait()
    {preparation}
    pathlib.Path("hanging").touch()
    time.sleep(600)
"""
EXPIRE = """
import pathlib, subprocess, threading, time
import psutil

def pytest_configure(config):
    limit = config.pluginmanager.get_plugin("run_limit")
    def wait():
        while not pathlib.Path("hanging").exists():
            time.sleep(0.01)
        limit.report_seconds = {report_seconds}
        {preparation}
        limit.expire()
    if limit is not None:
        threading.Thread(target=wait, daemon=True).start()

class EndedWorker:
    # A worker whose process has ended, and which leaves the session's set while that is listed.
    def __init__(self, session):
        self.session, self._io, self.popen = session, self, subprocess.Popen(["true"])
        self.popen.wait()
        session._active_nodes.add(self)

    @property
    def gateway(self):
        self.session._active_nodes.discard(self)
        return self

def refuse_kills():
    kill = psutil.Process.kill
    def kill_and_raise(process):
        kill(process)
        raise psutil.AccessDenied(process.pid)
    psutil.Process.kill = kill_and_raise
"""
IGNORE_INTERRUPTS = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


@pytest.mark.parametrize(
    ("workers", "preparations", "report_seconds", "status"),
    [
        pytest.param("0", ("", ""), 60, 2, id="one process", marks=STARTS_PYTEST),
        pytest.param("0", (IGNORE_INTERRUPTS, "refuse_kills()"), 0.2, 124, id="no interrupt", marks=STARTS_PYTEST),
        pytest.param("1", ("", "EndedWorker(config.pluginmanager.get_plugin('dsession'))"), 60, 2, id="worker"),
    ],
)
def test_a_hang_ends_at_the_limit_with_the_name_of_its_test(project, workers, preparations, report_seconds, status):
    of_test, of_limit = preparations
    project.write("conftest.py", CONFTEST + EXPIRE.format(report_seconds=report_seconds, preparation=of_limit))
    project.write("tests/test_hang.py", HANG.format(preparation=of_test))
    done, output = project.pytest("-n", workers, "--run-limit", "200", "tests")
    assert done == status, output
    assert "took longer than 200 s (--run-limit)" in output and "  tests/test_hang.py::test_hang (for" in output
    assert re.search(r'test_hang.py", line \d+ in test_hang', output), "the stacks are shown"
    assert status == 124 or "1 passed" in output, "results are shown"
    wait_until(lambda: not is_running(int(project.read("left_behind"))))


@STARTS_PYTEST
def test_a_worker_without_torch_names_the_module_that_imports_it(project):
    project.write("torch.py", "")
    project.write("conftest.py", CONFTEST + "import sys; sys.path.insert(0, '.')\n")
    for path in ("infer", "run/store"):
        project.write(f"tests/{path}/test_torch.py", "import torch\ndef test_torch(): pass")
        project.write(f"tests/{path}/test_light.py", "def test_light(): pass")
    status, output = project.pytest("-n", "2", "tests")
    assert status != 0 and "tests/run/store/test_torch.py imports torch while it is collected" in output
    assert "infer/test_torch.py imports" not in output
