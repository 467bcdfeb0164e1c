"""Helpers that run `ramify rl` and other commands like a user, in a directory of the test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.cli import main
from ramify.launch.run_queries import read_metrics

FULL = bool(os.environ.get("RAMIFY_FULL"))
KILLS = 20 if FULL else 2
TIMEOUT = 240.0  # seconds for one command
REPLAYED = ["--trainer.threads", "1", "--trainer.optim.lr", "1e-4"]

CONFIG = """
name = "run"
max_steps = {steps}
seq_len = 256
record_batches = true

[orchestrator]
batch_size = 16
group_size = 4
max_staleness = {off_policy}

[trainer]
record_token_stats = true

[trainer.optim]
lr = 1e-4

[checkpoint]
interval = 2

[launch]
max_restarts = 100

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
    """Return the command line of a ramify command."""
    return [sys.executable, "-m", "ramify", *args]


def run_command(*args: str, cwd: Path, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), cwd=cwd, capture_output=True, text=True, timeout=timeout)


def write_config(home: Path, *, steps: int, off_policy: int) -> Path:
    (home / "rl.toml").write_text(CONFIG.format(steps=steps, off_policy=off_policy))
    return home


def metrics(home: Path, name: str) -> list[float]:
    return [point.value for point in read_metrics(home / "outputs/run", name)]


def replay_gradient_norms(directory: Path, capsys: pytest.CaptureFixture[str], output: Path, *more: str) -> list[float]:
    """Replay a recording, and return the gradient norm of every step."""
    arguments = ["trainer", "-m", "tiny", "-o", str(output), "--replay", str(directory), *REPLAYED, *more]
    assert main(arguments) == 0
    return [float(norm) for norm in re.findall(r"grad_norm=(\S+)", capsys.readouterr().out)]
