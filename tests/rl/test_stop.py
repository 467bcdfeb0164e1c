"""Ctrl-C, and SIGTERM as a scheduler sends it: the run saves a checkpoint, and the same command resumes it."""

import re
import shlex
import signal
import subprocess
import time

import psutil
import pytest

from ramify.train.weights_directory import get_weights_directory
from tests.support.runs import TIMEOUT, command, read_values, run_command, write_config

pytestmark = pytest.mark.run

FLAGS = ["--weights.transport", "shm", "--checkpoint.interval", "1000"]


@pytest.mark.full("two starts of everything; tests/launch has the supervisor's part")
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_stopped_run_saves_a_checkpoint_and_is_resumed_by_the_command_it_prints(tmp_path, number, exit_code):
    home = write_config(tmp_path, steps=1000, max_staleness=2)
    run = home / "outputs" / "run"
    shared = get_weights_directory(run, "shm")
    with (home / "output.txt").open("w") as output:
        process = subprocess.Popen(command("rl", "@", "rl.toml", *FLAGS), cwd=home, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + TIMEOUT
            while not list(shared.glob("0-000001")):
                assert process.poll() is None and time.monotonic() < deadline, (home / "output.txt").read_text()
                time.sleep(0.05)
            descendants = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            assert process.wait(60) == exit_code, (home / "output.txt").read_text()
        finally:
            process.kill()
            process.wait()
    assert not [child for child in descendants if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not shared.exists()
    stopped_at = max(int(step.name[5:11]) for step in run.glob("checkpoints/step_*"))  # saved because of the stop
    why = run_command("why", "outputs/run", cwd=home).stdout
    assert f"{stopped_at} steps committed, 0 trained after the last checkpoint" in why
    assert "PeerLost" not in why and " × " not in why

    resume_command = re.search(r"resume with: ramify (.*)", (home / "output.txt").read_text())
    assert resume_command is not None
    arguments = [*shlex.split(resume_command[1]), "--max_steps", str(stopped_at + 1)]
    result = run_command(*arguments, cwd=home)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not shared.exists()
    num_steps = len(read_values(run, "train/grad_norm"))
    assert num_steps > stopped_at  # batches that were formed before the stop are trained too
    steps = re.findall(r"^step=(\d+) ", (run / "logs/trainer.log").read_text(), re.MULTILINE)
    assert len(steps) == len(set(steps))  # no step was trained twice
    assert [weights.name for weights in run.glob("weights/*")] == [f"1-{num_steps:06}"]
    assert run_command("why", "outputs/run", "--audit", cwd=home).returncode == 0
