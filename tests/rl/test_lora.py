"""LoRA adapters of rank 8 learn what the full model learns, from rewards and from a teacher's samples."""

from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file

from ramify.model.resolve import resolve_model_path
from tests.rl.run_helpers import FULL, metrics, run_command

FILES = Path(__file__).parents[2] / "examples" / "reverse_text"
EXAMPLE = FILES / "rl.toml"
LORA = ["--trainer.lora.enabled", "true", "--trainer.lora.rank", "8", "--trainer.lora.alpha", "16"]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not FULL, reason="minutes of two cores")
def test_adapters_learn_to_reverse_text(tmp_path):
    arguments = ["rl", "@", str(EXAMPLE), "--name", "run", *LORA, "--trainer.optim.lr", "3e-3"]
    result = run_command(*arguments, "--max_steps", "25", cwd=tmp_path, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    rewards = metrics(tmp_path, "reward/all/mean")
    assert fmean(rewards[-5:]) >= fmean(rewards[:5]) + 0.2
    evals = metrics(tmp_path, "eval/held-out/avg")
    assert evals[-1] >= evals[0] + 0.2


def test_adapters_learn_what_a_teacher_sampled(tmp_path):
    files = ["@", str(FILES / "sft_distil.toml"), "@", str(FILES / "lora.toml")]
    small = ["--max_steps", "1", "--orchestrator.batch_size", "8", "--eval", "[]"]
    small += ["--trainer.optim.schedule.warmup_steps", "0"]
    result = run_command("rl", *files, "--name", "run", "--models.teacher.name", "tiny", *small, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(metrics(tmp_path, "loss/ce")) == 1 and metrics(tmp_path, "train/grad_norm")[0] > 0
    assert "reward(teacher)=" in result.stdout, "the teacher samples"
    before = load_file(resolve_model_path("tiny") / "model.safetensors")
    after = load_file(tmp_path / "outputs" / "run" / "weights" / "0-000001" / "model.safetensors")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor.float(), after[name])}
    assert changed and all("_proj" in name for name in changed), "adapters are merged into linear maps only"
    assert before.keys() == after.keys()
