"""`ramify venv`, and the commands that run a source in another interpreter."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.cli.app import main
from ramify.processes import interpreter
from tests.support.engine import ScriptedEngine, reverse_some, run_engine
from tests.support.interpreters import TASKSET, make_interpreter

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    return make_interpreter(tmp_path_factory.mktemp("environments") / "other")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(interpreter.VENVS_VARIABLE, str(tmp_path / "environments"))
    Path("where.py").write_text(TASKSET)


def ramify(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ramify", *arguments], capture_output=True, text=True, timeout=100)


@pytest.mark.full("an eval runs in it below")
def test_validate_runs_in_the_named_interpreter(python):
    result = ramify("validate", "where.py", "--python", str(python))
    assert (result.returncode, result.stderr) == (0, "")
    assert "1 valid" in result.stdout
    assert main(["validate", "where.py"]) == 1  # the gold reply has no reward in this interpreter


def test_eval_runs_in_the_named_interpreter(python):
    with run_engine(ScriptedEngine(reverse_some)) as engine:
        arguments = ["-m", "tiny", "-b", engine.url, "-n", "1", "-r", "1", "--name", "run"]
        result = ramify("eval", "where.py", "--python", str(python), *arguments)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^in_other +1\.000", result.stdout, re.MULTILINE), result.stdout


def test_missing_core_is_exit_2_with_one_line(tmp_path, capsys):
    empty = make_interpreter(tmp_path / "empty", with_packages=False)
    assert main(["eval", "where.py", "-m", "tiny", "--python", str(empty)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "empty") in line and "ramify" in line


def test_list_names_environments_and_their_packages(tmp_path, capsys):
    home = tmp_path / "environments" / "games"
    home.mkdir(parents=True)
    (home / interpreter.INSTALLED_FILE).write_text(json.dumps({"base": "python", "packages": ["ramify", "chess"]}))
    assert main(["venv", "list"]) == 0
    assert capsys.readouterr().out == "games  ramify, chess\n"


def test_install_keeps_an_environment_that_has_the_packages(tmp_path, capsys, monkeypatch):
    from ramify.cli import venv

    python = make_interpreter(tmp_path / "environments" / "games")
    wanted = {"base": sys.executable, "packages": [venv._get_own_package("games"), "chess"]}
    (python.parents[1] / interpreter.INSTALLED_FILE).write_text(json.dumps(wanted))
    assert main(["venv", "install", "games", "chess"]) == 0
    assert capsys.readouterr().out == f"python = {str(python)!r}\n"


def test_install_that_fails_leaves_no_environment(tmp_path, capsys):
    assert main(["venv", "install", "games", "--python", "no-such-python"]) == 1
    assert "no-such-python" in capsys.readouterr().err
    assert main(["venv", "install", "../games"]) == 2
    assert interpreter.list_venvs() == []
