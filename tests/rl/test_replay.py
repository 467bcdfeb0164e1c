"""What a run trained on can be trained on again: its recorded batches say everything."""

import re
from dataclasses import replace

import numpy as np
import pytest

from ramify.cli import main
from ramify.model.resolve import resolve
from ramify.trace import Forest
from ramify.train.batches import Batch
from ramify.train.source import Recording
from tests.rl.running import metrics

SETTINGS = ["--trainer.threads", "1", "--trainer.optim.lr", "1e-4"]


@pytest.fixture(scope="module")
def recording(finished):
    return Recording(finished / "outputs/run/batches")


def replayed(folder, capsys, tmp_path, *more: str) -> list[float]:
    """The norms of the gradients of every step."""
    asked = ["trainer", "-m", "tiny", "-o", str(tmp_path), "--replay", str(folder), *SETTINGS, *more]
    assert main(asked) == 0
    return [float(norm) for norm in re.findall(r"grad_norm=(\S+)", capsys.readouterr().out)]


def test_a_replay_has_the_gradients_of_the_run_and_so_has_every_branch_laid_out_whole(
    finished, recording, capsys, tmp_path
):
    trained = metrics(finished, "train/grad_norm")
    again = replayed(recording.directory, capsys, tmp_path)
    flat = replayed(recording.directory, capsys, tmp_path, "--flat")
    assert len(trained) == len(again) == len(flat) == 3
    assert again == pytest.approx(trained, rel=1e-4)
    assert flat == pytest.approx(again, rel=1e-4)
    assert not list(tmp_path.rglob("*.safetensors"))  # nothing is kept


def test_temperatures_that_are_swapped_between_two_sources_are_seen(recording):
    """The control of `mismatch_kl`: with each temperature at the other source it is far from nothing."""
    from ramify.train.build import build_trainer  # torch is loaded here
    from ramify.train.config import TrainerConfig
    from ramify.train.parallel import joined

    with joined(TrainerConfig(threads=1)) as ranks:
        right, swapped = (
            build_trainer(resolve("tiny"), TrainerConfig(threads=1), ranks).step(batch).named()["mismatch_kl"]
            for batch in (recording.shares(0)[0], _swapped(recording.shares(0)[0]))
        )
    assert right < 1e-8
    assert swapped > 1e-3


def _swapped(batch: Batch) -> Batch:
    """The batch with the two temperatures in each other's place."""
    found = {float(degree) for pack in batch.packs for degree in pack.sequences["temperature"]}
    assert found == {1.0, float(np.float32(0.7))}
    return replace(batch, packs=[_exchanged(pack) for pack in batch.packs])


def _exchanged(pack: Forest) -> Forest:
    sequences = pack.sequences.copy()
    warm = sequences["temperature"] == 1.0
    sequences["temperature"] = np.where(warm, np.float32(0.7), np.float32(1.0))
    return replace(pack, sequences=sequences)
