"""A run whose last checkpoint is damaged ends by name, and goes on from the one before when it is told to."""

import re

import pytest

from tests.rl.running import FULL, ask, write

STEPS = ["--checkpoint.interval", "2", "--max_steps"]


@pytest.mark.skipif(not FULL, reason="three starts of everything; tests/train and tests/store have the parts")
def test_a_run_goes_on_from_an_older_checkpoint_only_when_it_is_told_to(tmp_path):
    home = write(tmp_path, steps=4, off_policy=1)
    assert ask("rl", "@", "rl.toml", *STEPS, "4", cwd=home).returncode == 0
    weights = home / "outputs/run/checkpoints/step_000004/__0_0.distcp"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    refused = ask("rl", "@", "rl.toml", *STEPS, "6", cwd=home)
    assert refused.returncode == 1
    assert re.search(r"CheckpointRefused: .*__0_0\.distcp is damaged.*'ramify rollback outputs/run 2'", refused.stderr)
    audited = ask("why", "outputs/run", "--audit", cwd=home)
    assert audited.returncode == 0, audited.stdout
    back = ask("rollback", "outputs/run", "2", cwd=home)
    assert "steps 2 to 3 are trained again" in back.stdout, back.stderr
    done = ask("rl", "@", "rl.toml", *STEPS, "6", cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    audited = ask("why", "outputs/run", "--audit", cwd=home)
    assert audited.returncode == 0, audited.stdout
