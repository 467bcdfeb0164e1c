"""`ramify rl` and the commands around it, as a user gives them, in a folder of the test's own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.cli import main

FULL = bool(os.environ.get("RAMIFY_FULL"))
KILLS = 20 if FULL else 2
DEADLINE = 240.0
REPLAYED = ["--trainer.threads", "1", "--trainer.optim.lr", "1e-4"]

CONFIG = """
name = "run"
max_steps = {steps}
seq_len = 256
record = true

[orchestrator]
batch_size = 16
group_size = 4
max_off_policy = {off_policy}

[trainer.optim]
lr = 1e-4

[checkpoint]
interval = 2

[launch]
restarts = 100

[[train]]
name = "warm"
taskset = {{ id = "reverse-text", num_tasks = 16 }}
sampling = {{ temperature = 1.0, max_tokens = 40 }}
max_turns = 1

[[train]]
name = "cool"
taskset = {{ id = "reverse-text", num_tasks = 16, seed = 1 }}
sampling = {{ temperature = 0.7, max_tokens = 40 }}
max_turns = 1

[[eval]]
name = "held-out"
taskset = {{ id = "reverse-text", split = "eval" }}
sampling = {{ max_tokens = 40 }}
num_tasks = 8
max_turns = 1
"""


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "ramify", *args]


def ask(*args: str, cwd: Path, deadline: float = DEADLINE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), cwd=cwd, capture_output=True, text=True, timeout=deadline)


def write(home: Path, *, steps: int, off_policy: int) -> Path:
    (home / "rl.toml").write_text(CONFIG.format(steps=steps, off_policy=off_policy))
    return home


def metrics(home: Path, name: str) -> list[float]:
    said = ask("metrics", "outputs/run", "--name", name, "--json", cwd=home)
    assert said.returncode == 0, said.stderr
    return [entry["value"] for entry in json.loads(said.stdout)]


def gradient_norms(folder: Path, capsys: pytest.CaptureFixture[str], output: Path, *more: str) -> list[float]:
    """The norms of the gradients of every step of a recording that is trained on again."""
    asked = ["trainer", "-m", "tiny", "-o", str(output), "--replay", str(folder), *REPLAYED, *more]
    assert main(asked) == 0
    return [float(norm) for norm in re.findall(r"grad_norm=(\S+)", capsys.readouterr().out)]
