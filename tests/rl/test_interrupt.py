"""Ctrl-C in the middle: the run says how it is while it lives, is gone at once, and the command it prints goes on.

It trains adapters, so that what the engines get is seen to be an ordinary model.
"""

import re
import shlex
import signal
import subprocess
import time

import psutil
import pytest
from safetensors import safe_open

from tests.rl.running import DEADLINE, FULL, ask, command, metrics, write

GONE = 10.0  # seconds after Ctrl-C
LORA = ["--trainer.lora.enabled", "true", "--trainer.lora.rank", "8", "--trainer.lora.alpha", "16"]


@pytest.mark.skipif(not FULL, reason="half a minute of two cores; tests/cli has the supervisor's part")
def test_an_interrupted_run_answers_before_leaves_nothing_and_is_continued_by_the_command_it_prints(tmp_path):
    home = write(tmp_path, steps=40, off_policy=1)
    words = ["rl", "@", "rl.toml", *LORA]
    run = subprocess.Popen(command(*words), cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + DEADLINE
        while not list((home / "outputs/run/checkpoints").glob("step_*")):
            assert run.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        assert metrics(home, "reward/all/mean")
        why = ask("why", "outputs/run", cwd=home)
        assert why.returncode == 0 and "step=" in why.stdout and "not running" not in why.stdout
        family = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=GONE)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    again = shlex.split(re.search(r"resume with: ramify (.*)", said)[1])
    done = len(metrics(home, "committed"))
    newest = max((home / "outputs/run/checkpoints").glob("step_*")).name
    last = int(newest[5:]) + 2
    resumed = ask(*again, "--max_steps", str(last), cwd=home)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert len(metrics(home, "committed")) > done
    assert ask("why", "outputs/run", "--audit", cwd=home).returncode == 0
    weights = max((home / "outputs/run/weights").glob("*-*"))
    with safe_open(weights / "model.safetensors", "np") as file:
        assert not [name for name in file.keys() if "lora" in name or "base_layer" in name]  # noqa: SIM118
