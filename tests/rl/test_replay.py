"""Recorded batches of a run can be replayed."""

import pytest

from tests.rl.run_helpers import metrics, replay_gradient_norms


def test_replay_has_the_gradients_of_the_run_also_with_flat_packs(finished, capsys, tmp_path):
    trained, batches = metrics(finished, "train/grad_norm"), finished / "outputs/run/batches"
    replayed = replay_gradient_norms(batches, capsys, tmp_path)
    flat = replay_gradient_norms(batches, capsys, tmp_path, "--flat")
    assert len(trained) == len(replayed) == len(flat) == 3
    assert replayed == pytest.approx(trained, rel=1e-4)
    assert flat == pytest.approx(replayed, rel=1e-4)
    assert not list(tmp_path.rglob("*.safetensors"))  # no weights are written
