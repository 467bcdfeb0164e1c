"""Runs written by an earlier version are read, audited and resumed.

`tests/fixtures/older_runs` holds a run that finished and one that was killed by SIGKILL after its eighth step, both as
version 0.1.0 wrote them. They are never written again: a change of the stored format needs a migration, not a new
fixture.
"""

import json
import shutil
from pathlib import Path

import pytest

from ramify.cli import main
from tests.support.runs import run_command

pytestmark = pytest.mark.run

OLDER_RUNS = Path(__file__).parents[1] / "fixtures" / "older_runs"


@pytest.fixture
def home(tmp_path):
    """A directory with the model, the taskset, the configurations and the two runs."""
    shutil.copytree(OLDER_RUNS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs").rename(tmp_path / "outputs")
    for file in tmp_path.glob("*.toml"):  # only a stored configuration may have old keys
        file.write_text(file.read_text("utf-8").replace("max_off_policy", "max_staleness"), encoding="utf-8")
    return tmp_path


@pytest.fixture
def run_successfully(home, monkeypatch, capsys):
    """Run a command that must succeed, and return its output."""
    monkeypatch.chdir(home)

    def run(*arguments):
        exit_code = main(list(arguments))
        output = capsys.readouterr()
        assert exit_code == 0, output.out + output.err
        return output.out

    return run


@pytest.mark.promise
@pytest.mark.parametrize(("run", "steps", "groups"), [("finished", 4, 8), ("killed", 8, 20)])
def test_older_run_is_read_and_audited(run_successfully, run, steps, groups):
    assert "letters" in run_successfully("show", f"outputs/{run}")
    rows = [json.loads(line) for line in run_successfully("metrics", f"outputs/{run}", "--json").splitlines()]
    assert rows
    assert f"{groups} groups, {steps} steps: no problems" in run_successfully("why", "--audit", f"outputs/{run}")


@pytest.mark.full("a run; the tests above read and audit it")
def test_older_run_that_was_killed_is_resumed(home, run_successfully):
    result = run_command("rl", "@", "killed.toml", "--max_steps", "10", cwd=home)
    assert result.returncode == 0, result.stdout + result.stderr
    checkpoints = home / "outputs" / "killed" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir())[-1] == "step_000010-1"  # of the second trainer
    assert "10 steps: no problems" in run_successfully("why", "--audit", "outputs/killed")
