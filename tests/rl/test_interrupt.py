"""Ctrl-C during a run: it ends at once, and the command that it prints resumes it.

The run trains LoRA adapters, to check that the engines get merged weights.
"""

import re
import shlex
import signal
import subprocess
import time

import psutil
import pytest
from safetensors import safe_open

from tests.rl.run_helpers import FULL, TIMEOUT, command, metrics, run_command, write_config

EXIT_TIMEOUT = 10.0  # seconds after Ctrl-C
LORA = ["--trainer.lora.enabled", "true", "--trainer.lora.rank", "8", "--trainer.lora.alpha", "16"]


@pytest.mark.skipif(not FULL, reason="half a minute of two cores; tests/cli has the supervisor's part")
def test_interrupted_run_is_resumed_by_the_command_it_prints(tmp_path):
    home = write_config(tmp_path, steps=40, off_policy=1)
    arguments = ["rl", "@", "rl.toml", *LORA]
    run = subprocess.Popen(command(*arguments), cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + TIMEOUT
        while not list((home / "outputs/run/checkpoints").glob("step_*")):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert metrics(home, "reward/all/mean")
        why = run_command("why", "outputs/run", cwd=home)
        assert why.returncode == 0 and "step=" in why.stdout and "not running" not in why.stdout
        descendants = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        _, stderr = run.communicate(timeout=EXIT_TIMEOUT)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130
    assert not [child for child in descendants if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    resume_arguments = shlex.split(re.search(r"resume with: ramify (.*)", stderr)[1])
    num_commits = len(metrics(home, "committed"))
    newest = max((home / "outputs/run/checkpoints").glob("step_*")).name
    last_step = int(newest[5:]) + 2
    resumed = run_command(*resume_arguments, "--max_steps", str(last_step), cwd=home)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert len(metrics(home, "committed")) > num_commits
    assert run_command("why", "outputs/run", "--audit", cwd=home).returncode == 0
    weights = max((home / "outputs/run/weights").glob("*-*"))
    with safe_open(weights / "model.safetensors", "np") as file:
        assert not [name for name in file.keys() if "lora" in name or "base_layer" in name]  # noqa: SIM118
