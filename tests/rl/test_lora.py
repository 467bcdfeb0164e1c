"""Adapters of rank 8 learn what the whole model learns."""

from pathlib import Path
from statistics import fmean

import pytest

from tests.rl.running import FULL, ask, metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse_text" / "rl.toml"
LORA = ["--trainer.lora.enabled", "true", "--trainer.lora.rank", "8", "--trainer.lora.alpha", "16"]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not FULL, reason="minutes of two cores")
def test_adapters_learn_to_write_backwards(tmp_path):
    words = ["rl", "@", str(EXAMPLE), "--name", "run", *LORA, "--trainer.optim.lr", "3e-3"]
    done = ask(*words, "--max_steps", "25", cwd=tmp_path, deadline=500)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = metrics(tmp_path, "reward/all/mean")
    assert fmean(rewards[-5:]) >= fmean(rewards[:5]) + 0.2
    measured = metrics(tmp_path, "eval/held-out/avg")
    assert measured[-1] >= measured[0] + 0.2
