"""SIGTERM, as a scheduler sends it: the run saves a checkpoint, leaves no shared memory, and can be resumed."""

import signal
import subprocess
import time

import pytest

from ramify.train.weights_directory import get_weights_directory
from tests.rl.run_helpers import FULL, TIMEOUT, command, metrics, run_command, write_config

SHM = ["--weights.transport", "shm", "--checkpoint.interval", "1000"]


@pytest.mark.skipif(not FULL, reason="two starts of everything; tests/launch has the supervisor's part")
def test_stopped_run_saves_a_checkpoint_and_resumes_from_it(tmp_path):
    home = write_config(tmp_path, steps=1000, off_policy=2)
    path = home / "outputs" / "run"
    shared = get_weights_directory(path, "shm")
    with (home / "output.txt").open("w") as output:
        run = subprocess.Popen(command("rl", "@", "rl.toml", *SHM), cwd=home, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + TIMEOUT
            while not list(shared.glob("0-000001")):
                assert run.poll() is None and time.monotonic() < deadline, (home / "output.txt").read_text()
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
            assert run.wait(60) == 75, (home / "output.txt").read_text()
        finally:
            run.kill()
            run.wait()
    assert not shared.exists()
    stopped_at = max(int(step.name[5:11]) for step in path.glob("checkpoints/step_*"))  # saved because of the stop
    result = run_command("rl", "@", "rl.toml", *SHM, "--max_steps", str(stopped_at + 1), cwd=home)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not shared.exists()
    steps = len(metrics(home, "train/grad_norm"))
    assert steps > stopped_at  # batches that were formed before the stop are trained too
    assert [weights.name for weights in path.glob("weights/*")] == [f"1-{steps:06}"]
    assert run_command("why", "outputs/run", "--audit", cwd=home).returncode == 0
