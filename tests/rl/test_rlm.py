"""`ramify rl` with the harness rlm."""

from pathlib import Path

import pytest

from tests.rl.run_helpers import FULL, metrics, run_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "wikispeedia" / "rl_rlm.toml"


@pytest.mark.timeout(600)
@pytest.mark.skipif(not FULL, reason="minutes of two cores")
def test_two_steps_are_trained(tmp_path):
    result = run_command("rl", "@", str(EXAMPLE), "--name", "run", "--max_steps", "2", cwd=tmp_path, timeout=580)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "finished: all 2 steps" in result.stdout
    assert len(metrics(tmp_path, "reward/all/mean")) == 2
