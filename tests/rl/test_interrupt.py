"""Ctrl-C during a run: it saves a checkpoint, counts no failure, and the command that it prints resumes it.

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

LORA = ["--trainer.lora.enabled", "true", "--trainer.lora.rank", "8", "--trainer.lora.alpha", "16"]


@pytest.mark.skipif(not FULL, reason="half a minute of two cores; tests/launch has the supervisor's part")
def test_interrupted_run_is_resumed_by_the_command_it_prints(tmp_path):
    home = write_config(tmp_path, steps=40, off_policy=1)
    arguments = ["rl", "@", "rl.toml", "--checkpoint.interval", "1000", *LORA]
    trainer_log = home / "outputs/run/logs/trainer.log"

    def list_trained_steps() -> list[str]:
        return re.findall(r"^step=(\d+) ", trainer_log.read_text(), re.MULTILINE) if trainer_log.exists() else []

    run = subprocess.Popen(command(*arguments), cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + TIMEOUT
        while len(list_trained_steps()) < 2:
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert metrics(home, "reward/all/mean")
        why = run_command("why", "outputs/run", cwd=home)
        assert why.returncode == 0 and "step=" in why.stdout and "not running" not in why.stdout
        descendants = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        _, stderr = run.communicate(timeout=TIMEOUT)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130
    assert not [child for child in descendants if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    num_trained = len(list_trained_steps())
    why = run_command("why", "outputs/run", cwd=home).stdout
    assert f"is interrupted: {num_trained} steps committed, 0 trained after the last checkpoint" in why
    assert "PeerLost" not in why and " × " not in why

    resume_command = re.search(r"resume with: ramify (.*)", stderr)
    assert resume_command is not None
    resume_arguments = shlex.split(resume_command[1])
    resumed = run_command(*resume_arguments, "--max_steps", str(num_trained + 2), cwd=home)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    steps = list_trained_steps()
    assert len(steps) > num_trained and len(steps) == len(set(steps))  # no step was trained twice
    assert run_command("why", "outputs/run", "--audit", cwd=home).returncode == 0
    weights = max((home / "outputs/run/weights").glob("*-*"))
    with safe_open(weights / "model.safetensors", "np") as file:
        assert not [name for name in file.keys() if "lora" in name or "base_layer" in name]  # noqa: SIM118
