"""A run with a damaged checkpoint is refused, and resumes from an older one after `ramify rollback`."""

import re

import pytest

from tests.support.runs import run_command, write_config

pytestmark = pytest.mark.run

STEPS = ["--checkpoint.interval", "2", "--max_steps"]


@pytest.mark.full("three starts of everything; tests/train and tests/store have the parts")
def test_damaged_checkpoint_is_refused_until_a_rollback(tmp_path):
    home = write_config(tmp_path, steps=4, max_staleness=1)
    assert run_command("rl", "@", "rl.toml", *STEPS, "4", cwd=home).returncode == 0
    weights = home / "outputs/run/checkpoints/step_000004-0/__0_0.distcp"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    refused = run_command("rl", "@", "rl.toml", *STEPS, "6", cwd=home)
    assert refused.returncode == 1
    assert re.search(r"CheckpointRefused: .*__0_0\.distcp is damaged.*'ramify rollback outputs/run 2'", refused.stderr)
    audited = run_command("why", "outputs/run", "--audit", cwd=home)
    assert audited.returncode == 1
    assert audited.stdout.count("damaged") == 1  # the ledger has no problem
    rolled_back = run_command("rollback", "outputs/run", "2", cwd=home)
    assert "steps 2 to 3 are trained again" in rolled_back.stdout, rolled_back.stderr
    result = run_command("rl", "@", "rl.toml", *STEPS, "6", cwd=home)
    assert result.returncode == 0, result.stdout + result.stderr
    audited = run_command("why", "outputs/run", "--audit", cwd=home)
    assert audited.returncode == 0, audited.stdout
