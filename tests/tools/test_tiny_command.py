"""`python -m tools.tiny` as somebody types it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def run_command(*arguments):
    command = [sys.executable, "-m", "tools.tiny", *arguments]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)


def test_build_does_not_overwrite(tmp_path):
    (tmp_path / "file").write_text("mine")
    done = run_command("build", "-o", str(tmp_path))
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_measuring_a_model_that_is_missing_says_so(tmp_path):
    done = run_command("measure", str(tmp_path / "absent"))
    assert done.returncode == 2
    assert "ModelNotFound" in done.stderr
