"""The process that compares answers, with a small library in the place of math-verify."""

import json
import os
import resource
import subprocess
import sys

import pytest

from ramify.env.tasksets.answers import MathChecker

pytestmark = pytest.mark.process

LIBRARY = """
import os
print("true")
def parse(text, parsing_timeout):
    print("true", flush=True)
    return text.removeprefix("\\\\boxed{").removesuffix("}")
def verify(expected, answer, timeout_seconds):
    os.write(1, b"true\\n")
    if answer == "die":
        os._exit(1)
    return expected == answer
"""

COMPARE_TWICE = """
import json, os
from ramify.core.errors import EnvironmentFault
from ramify.env.tasksets.answers import MathChecker
checker, errors = MathChecker(seconds=5.0), []
num_before = len(os.listdir("/proc/self/fd"))
for _ in range(2):
    try:
        checker.compare("1", "1")
    except EnvironmentFault as error:
        errors.append(str(error))
print(json.dumps([errors, num_before, len(os.listdir("/proc/self/fd"))]))
"""


@pytest.fixture
def make_checker(tmp_path, monkeypatch):
    """Return a checker whose library is `source`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    checkers = []

    def make(source: str) -> MathChecker:
        (tmp_path / "math_verify.py").write_text(source)
        checkers.append(MathChecker(seconds=5.0))
        return checkers[-1]

    yield make
    for checker in checkers:
        checker.close()


def test_what_the_library_prints_is_no_answer(make_checker):
    checker = make_checker(LIBRARY)
    assert [checker.compare("1", reply) for reply in ("1", "2", "1", "3")] == [True, False, True, False]


def test_a_process_that_ends_during_a_comparison_is_replaced(make_checker):
    checker = make_checker(LIBRARY)
    assert checker.compare("1", "die") is None
    assert checker.compare("1", "1") is True


def test_a_process_that_ended_between_comparisons_is_replaced(make_checker):
    checker = make_checker(LIBRARY)
    assert checker.compare("1", "1") is True
    checker._process.kill()
    os.waitid(os.P_PID, checker._process.pid, os.WEXITED | os.WNOWAIT)
    assert checker.compare("1", "1") is True


def test_a_library_that_does_not_start_is_named_and_leaves_nothing(tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    # in a process of its own, because threads of other tests open and close files in this one
    done = subprocess.run(
        [sys.executable, "-c", COMPARE_TWICE], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    errors, num_before, num_after = json.loads(done.stdout)
    assert len(errors) == 2 and all("could not be started" in error for error in errors)
    assert num_after == num_before


def test_a_process_with_many_open_files_compares(make_checker):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("a process may not open 2000 files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    copies = [os.dup(0) for _ in range(1100)]  # beyond the 1024 of select
    try:
        assert make_checker(LIBRARY).compare("1", "1") is True
    finally:
        for descriptor in copies:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
