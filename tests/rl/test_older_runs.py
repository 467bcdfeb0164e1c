"""Runs written by an earlier version are read, audited and continued.

`tests/fixtures/older_runs` holds a run that finished and one that was ended by SIGKILL after its eighth step, both as
version 0.1.0 left them before the great renaming. They are never written again: whoever changes what is stored
adds a migration, not a new fixture.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.rl.running import ask

OLDER_RUNS = Path(__file__).parents[1] / "fixtures" / "older_runs"


@pytest.fixture
def home(tmp_path):
    """A working folder with the model, the taskset, the configs and the two runs."""
    shutil.copytree(OLDER_RUNS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs").rename(tmp_path / "outputs")
    return tmp_path


def ask_about(home, *arguments):
    done = ask(*arguments, cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("run", "steps", "groups"), [("finished", 4, 8), ("killed", 8, 20)])
def test_an_older_run_is_shown_measured_and_audited(home, run, steps, groups):
    assert "letters" in ask_about(home, "show", f"outputs/{run}")
    rows = [json.loads(line) for line in ask_about(home, "metrics", f"outputs/{run}", "--json").splitlines()]
    assert rows
    assert f"{groups} groups, {steps} steps: no problems" in ask_about(home, "why", "--audit", f"outputs/{run}")


def test_an_older_run_that_was_killed_is_continued_to_its_end(home):
    ask_about(home, "rl", "@", "killed.toml")
    assert (home / "outputs" / "killed" / "checkpoints" / "step_000012").is_dir()
    assert "12 steps: no problems" in ask_about(home, "why", "--audit", "outputs/killed")
