"""What a run trained on can be trained on again: its recorded batches say everything."""

import pytest

from tests.rl.running import gradient_norms, metrics


def test_a_replay_has_the_gradients_of_the_run_and_so_has_every_branch_laid_out_whole(finished, capsys, tmp_path):
    trained, batches = metrics(finished, "train/grad_norm"), finished / "outputs/run/batches"
    again = gradient_norms(batches, capsys, tmp_path)
    flat = gradient_norms(batches, capsys, tmp_path, "--flat")
    assert len(trained) == len(again) == len(flat) == 3
    assert again == pytest.approx(trained, rel=1e-4)
    assert flat == pytest.approx(again, rel=1e-4)
    assert not list(tmp_path.rglob("*.safetensors"))  # nothing is kept
