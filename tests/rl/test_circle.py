"""The circle of RL and SFT with `tiny`: RL, the best rollouts as data, SFT with evals, RL from its result, an eval."""

import itertools
from pathlib import Path
from typing import Any

import pytest

import ramify as rf
from ramify.cli import main
from ramify.model.resolve import fetch_model
from ramify.model.run_models import MODELS_DIR
from ramify.run.reader import read_metrics
from tests.support.greedy import render_prompts, sample_with_engine, sample_with_transformers

pytestmark = [
    pytest.mark.run,
    pytest.mark.full("learns for several minutes"),
    pytest.mark.timeout(3000),
]
SAMPLING = {"temperature": 1.0, "max_tokens": 48}
EVAL = {
    "name": "held-out",
    "taskset": {"id": "reverse-text", "split": "eval"},
    "sampling": SAMPLING,
    "num_tasks": 400,
    "interval": 10,
}
TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}, "sampling": SAMPLING, "max_turns": 1}
MAX_FALL = 0.02


def train_rl(name: str, model: str, steps: int, lr: float) -> None:
    table: dict[str, Any] = {
        "name": name,
        "max_steps": steps,
        "seq_len": 256,
        "model": {"name": model},
        "orchestrator": {"batch_size": 192, "group_size": 8, "max_staleness": 2},
        "trainer": {"pack_tokens": 4096, "optim": {"lr": lr, "schedule": {"warmup_steps": 10}}},
        "checkpoint": {"interval": 10, "keep_last": 1, "keep_best": "eval/held-out/avg"},
        "train": [TRAIN],
        "eval": [EVAL],
    }
    rf.rl(table)


def read_evals(name: str) -> list[float]:
    return [point.value for point in read_metrics(Path("outputs") / name, "eval/held-out/avg")]


def test_no_stage_of_the_circle_falls_and_its_model_is_that_of_transformers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_rl("first", "tiny", 12, 1e-4)
    assert main(["export", "first", "--to", "sft", "--best", "1", "--min-reward", "0.9", "-o", "best.jsonl"]) == 0
    rf.sft(
        name="tuned",
        model="run:first@best:eval/held-out/avg",
        data="best.jsonl",
        seq_len=256,
        batch_size=16,
        epochs=2,
        eval=[{**EVAL, "interval": None}],
        trainer={"optim": {"lr": 1e-4}},
    )
    train_rl("second", "run:tuned", 15, 1e-4)
    result = rf.evaluate("reverse-text", sampling=SAMPLING, model="run:second", num_tasks=400, repetitions=1)
    assert result.reward is not None
    first, tuned, second = read_evals("first"), read_evals("tuned"), read_evals("second")
    print(f"first {first}\ntuned {tuned}\nsecond {second}\neval {result.reward.mean}")
    assert first[-1] >= 0.7
    stages = [max(first), tuned[-1], second[-1], result.reward.mean]
    assert all(after >= before - MAX_FALL for before, after in itertools.pairwise(stages)), stages
    assert stages[-1] - first[0] >= 0.25

    (model,) = (tmp_path / "outputs" / "second" / MODELS_DIR).iterdir()
    assert fetch_model("run:second") == model
    prompts = render_prompts(model)
    assert sample_with_engine(model, prompts) == sample_with_transformers(model, prompts)
