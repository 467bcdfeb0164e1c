"""What the checks of both generations of verifiers share."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.env.adapters.training import run_ramify, train, write_eval

HERE = Path(__file__).parent
NUM_STEPS = 3
COMPARE_DEADLINE = 900  # seconds


def make_importable(*folders: str) -> None:
    """Let the interpreters that are started from now on import the environments in folders beside this file."""
    os.environ["PYTHONPATH"] = ":".join(map(str, [*(HERE / folder for folder in folders), HERE.parents[1]]))


def compare_rewards(python: Path, script: str, names: Sequence[str]) -> dict[str, Any]:
    """Compare our rewards with verifiers' own runner on the same replies, and return all results."""
    command = [str(python), str(HERE / script), *names]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=COMPARE_DEADLINE).stdout
    results = {row["env"]: row for row in (json.loads(line) for line in shown.splitlines() if line.startswith("{"))}
    for name in names:
        row = results[name]
        assert row["errors"] == [], row
        assert row["ours"] == pytest.approx(row["theirs"]), row
        print(f"   {name}: {len(row['ours'])} rewards equal verifiers' rewards: {row['ours']}", flush=True)
    return results


def evaluate_and_train(python: Path, output: Path, taskset: dict[str, Any]) -> None:
    """Evaluate and train `tiny` on an environment."""
    name = taskset["env"]
    source = {"taskset": {"id": "verifiers", **taskset}, "python": str(python)}
    source["sampling"] = {"temperature": 1.0, "max_tokens": 32}
    file = write_eval(output, f"{name}-eval", {**source, "num_tasks": 4, "repetitions": 2})
    run_ramify("eval", "@", str(file), "-m", "tiny")
    traces = train(output, name, source, steps=NUM_STEPS)
    rewards = [trace.reward for trace in traces if trace.reward is not None]
    print(f"   {name}: {NUM_STEPS} steps, {len(traces)} rollouts, mean {sum(rewards) / len(rewards):.3f}", flush=True)
