"""A scheduler takes the machine back and gives it again: nothing is lost, and nothing stays behind in memory."""

import signal
import subprocess
import time

import pytest

from ramify.train.weights_directory import get_weights_directory
from tests.rl.running import DEADLINE, FULL, ask, command, metrics, write

SHM = ["--weights.transport", "shm", "--checkpoint.interval", "1000"]


@pytest.mark.skipif(not FULL, reason="two starts of everything; tests/launch has the supervisor's part")
def test_a_run_that_is_asked_to_leave_makes_a_checkpoint_and_goes_on_from_it(tmp_path):
    home = write(tmp_path, steps=1000, off_policy=2)
    path = home / "outputs" / "run"
    shared = get_weights_directory(path, "shm")
    with (home / "said.txt").open("w") as said:
        run = subprocess.Popen(command("rl", "@", "rl.toml", *SHM), cwd=home, stdout=said, stderr=said)
        try:
            end = time.monotonic() + DEADLINE
            while not list(shared.glob("0-000001")):
                assert run.poll() is None and time.monotonic() < end, (home / "said.txt").read_text()
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
            assert run.wait(60) == 75, (home / "said.txt").read_text()
        finally:
            run.kill()
            run.wait()
    assert not shared.exists()
    left = max(int(step.name[5:]) for step in path.glob("checkpoints/step_*"))  # made because it was asked to
    done = ask("rl", "@", "rl.toml", *SHM, "--max_steps", str(left + 1), cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not shared.exists()
    steps = len(metrics(home, "train/grad_norm"))
    assert steps > left  # batches that were decided already are trained too
    assert [kept.name for kept in path.glob("weights/*")] == [f"1-{steps:06}"]
    assert ask("why", "outputs/run", "--audit", cwd=home).returncode == 0
