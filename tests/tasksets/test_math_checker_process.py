"""The process that compares answers, with a small library in the place of math-verify."""

import os
import resource
from pathlib import Path

import pytest

from ramify.errors import EnvironmentFault
from ramify.tasksets.math_checker import MathChecker

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


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


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


def test_a_library_that_does_not_start_is_named_and_leaves_nothing(make_checker):
    checker = make_checker("raise ImportError('broken')")
    before = count_open_files()
    for _ in range(2):
        with pytest.raises(EnvironmentFault, match="could not be started"):
            checker.compare("1", "1")
    assert count_open_files() == before


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
