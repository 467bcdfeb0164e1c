"""LoRA adapters of rank 8 learn what the full model learns."""

from pathlib import Path
from statistics import fmean

import pytest

from tests.support.runs import read_values, run_command

pytestmark = pytest.mark.run

EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse_text" / "rl.toml"
LORA = ["--trainer.lora.enabled", "true", "--trainer.lora.rank", "8", "--trainer.lora.alpha", "16"]


@pytest.mark.timeout(600)
@pytest.mark.full("minutes of two cores")
def test_adapters_learn_to_reverse_text(tmp_path):
    arguments = ["rl", "@", str(EXAMPLE), "--name", "run", *LORA, "--trainer.optim.lr", "3e-3"]
    result = run_command(*arguments, "--max_steps", "25", cwd=tmp_path, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    rewards = read_values(tmp_path / "outputs" / "run", "reward/all/mean")
    assert fmean(rewards[-5:]) >= fmean(rewards[:5]) + 0.2
    evals = read_values(tmp_path / "outputs" / "run", "eval/held-out/avg")
    assert evals[-1] >= evals[0] + 0.2
