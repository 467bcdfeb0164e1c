"""The notebook among the examples runs from its first cell to its last."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


@pytest.mark.skipif(not os.environ.get("RAMIFY_FULL"), reason="half a minute of two cores")
@pytest.mark.timeout(600)
def test_the_notebook_runs_in_a_running_event_loop_and_shows_progress(tmp_path):
    command = [sys.executable, "-m", "tests.support.notebook_runner", str(NOTEBOOK)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done=32/32" in done.stdout, "evaluate shows its progress"
    assert "/3 state=running" in done.stdout, "rl shows its progress"
    assert "weights" in done.stdout.splitlines()[-1]
    assert (tmp_path / "outputs" / "notebook" / "Reverse.py").is_file()
