"""Runs of `ramify rl` as a user starts them, and one finished run that all tests of a session only read."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FULL = bool(os.environ.get("RAMIFY_FULL"))
TIMEOUT = 240.0  # seconds for one command

SETTINGS = """
name = "run"
max_steps = {steps}
seq_len = 256
record_batches = true

[orchestrator]
batch_size = 8
group_size = 4
max_staleness = {max_staleness}

[trainer]
record_token_stats = true

[trainer.optim]
lr = 1e-4

[checkpoint]
interval = {interval}

[launch]
max_restarts = 100

[[train]]
name = "warm"
taskset = {{ id = "reverse-text", num_tasks = 16 }}
sampling = {{ temperature = 1.0, max_tokens = 40 }}
max_turns = 1
"""
SECOND_TEMPERATURE = """
[[train]]
name = "cool"
taskset = { id = "reverse-text", num_tasks = 16, seed = 1 }
sampling = { temperature = 0.7, max_tokens = 40 }
max_turns = 1
"""
HELD_OUT = """
[[eval]]
name = "held-out"
taskset = { id = "reverse-text", split = "eval" }
sampling = { max_tokens = 40 }
num_tasks = 4
max_turns = 1
"""
FINISHED_STEPS = 2  # of the finished run


def command(*args: str) -> list[str]:
    """Return the command line of a ramify command."""
    return [sys.executable, "-m", "ramify", *args]


def run_command(*args: str, cwd: Path, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), cwd=cwd, capture_output=True, text=True, timeout=timeout)


def write_config(home: Path, *, steps: int, max_staleness: int, interval: int = 2, more: str = "") -> Path:
    """Write `rl.toml` with one source of reverse-text, and return the directory."""
    settings = SETTINGS.format(steps=steps, max_staleness=max_staleness, interval=interval)
    (home / "rl.toml").write_text(settings + more)
    return home


def read_values(run: Path, name: str) -> list[float]:
    """Return the values of a metric of a run, by step."""
    from ramify.launch.run_queries import read_metrics

    return [point.value for point in read_metrics(run, name)]


def wait_for_process(command: subprocess.Popen, run: Path, name: str, *, step: int, timeout: float = TIMEOUT) -> int:
    """Wait until a process of a run is ready and `step` steps are trained, and return its pid."""
    deadline = time.monotonic() + timeout
    while True:
        assert command.poll() is None and time.monotonic() < deadline, f"the run ended before step {step}"
        time.sleep(0.02)
        try:
            process = json.loads((run / "run.json").read_text())["processes"][name]
            if process["state"] == "ready" and json.loads((run / "status.json").read_text())["status"]["step"] >= step:
                return process["pid"]
        except (OSError, ValueError, KeyError):  # not written yet
            continue


def share_finished_run(factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the finished run; the first worker of a session that asks makes it, others wait."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    home, failure = base / "finished_run", base / "finished_run.failure"
    with (base / "finished_run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held for at most the timeout of the command
        if not home.exists():
            failure.write_text("the run did not end")
            home.mkdir()
            write_config(home, steps=FINISHED_STEPS, max_staleness=0, more=SECOND_TEMPERATURE + HELD_OUT)
            result = run_command("rl", "@", "rl.toml", cwd=home)
            if result.returncode == 0:
                failure.unlink()
            else:
                failure.write_text(result.stdout + result.stderr)
    assert not failure.exists(), failure.read_text()
    return home / "outputs" / "run"
