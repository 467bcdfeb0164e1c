"""Sources that run in another interpreter: how it is found, and what must be installed there."""

import json
import sys

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.processes import interpreter
from tests.support.interpreters import make_interpreter

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def environments(tmp_path, monkeypatch):
    monkeypatch.setenv(interpreter.VENVS_VARIABLE, str(tmp_path / "environments"))
    return tmp_path / "environments"


def test_no_python_and_this_python_are_no_other_interpreter():
    assert interpreter.find_other_interpreter(None) is None
    assert interpreter.find_other_interpreter(sys.executable) is None


def test_interpreter_without_the_core_is_one_line_with_venv_and_packages(tmp_path):
    python = make_interpreter(tmp_path / "empty", with_packages=False)
    with pytest.raises(ConfigInvalid) as error:
        interpreter.find_other_interpreter(str(python))
    assert error.value.message.startswith(f"{tmp_path / 'empty'} lacks the package ramify; ")
    assert f"{python} -m pip install ramify==" in error.value.message
    assert "\n" not in error.value.message


def test_path_that_is_no_interpreter_is_refused(tmp_path):
    with pytest.raises(ConfigInvalid, match="missing/bin/python is not an interpreter"):
        interpreter.find_interpreter(str(tmp_path / "missing/bin/python"))


def test_name_of_an_installed_environment_is_found(environments):
    python = make_interpreter(environments / "games")
    with pytest.raises(ConfigInvalid, match="ramify venv install games"):
        interpreter.find_interpreter("games")  # it is not complete
    (environments / "games" / interpreter.INSTALLED_FILE).write_text(json.dumps({"base": "python", "packages": []}))
    assert interpreter.find_other_interpreter("games") == python
    with pytest.raises(ConfigInvalid, match="did you mean 'games'"):
        interpreter.find_interpreter("gmaes")


def test_missing_requirement_of_the_core_is_named(tmp_path):
    python = make_interpreter(tmp_path / "half", with_packages=False)
    (packages,) = (tmp_path / "half" / "lib").glob("python*/site-packages")
    info = packages / "ramify-0.1.0.dist-info"
    info.mkdir()
    requirements = "Requires-Dist: numpy>=2\nRequires-Dist: torch>=2; extra == 'local'"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ramify\nVersion: 0.1.0\n{requirements}\n")
    with pytest.raises(ConfigInvalid, match="/half lacks the package numpy; "):
        interpreter.find_other_interpreter(str(python))


@pytest.mark.parametrize(
    ("code", "reason"),
    [("echo 3 >&2; exit 1", "3"), ("exit 0", "it printed nothing"), ("echo hello", "hello")],
)
def test_a_program_that_does_not_work_as_python_is_refused_in_one_line(tmp_path, code, reason):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{code}\n")
    program.chmod(0o755)
    with pytest.raises(ConfigInvalid) as error:
        interpreter.check_interpreter(program)
    assert error.value.message == f"{program} does not work as a Python interpreter: {reason}"
