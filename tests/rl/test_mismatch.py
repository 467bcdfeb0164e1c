"""Trained is what was sampled: the trainer finds the logprobs that the engine gave, for two temperatures in one batch.

In float32 and without staleness nothing may be left but rounding. With full counts it is looked at over 1e5 tokens.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from ramify.model.resolve import resolve_model_path
from ramify.trace import Forest
from ramify.train.batch import Batch
from ramify.train.batch_source import BatchRecording
from tests.rl.running import FULL, ask, gradient_norms, metrics, write

TOKENS = 100_000 if FULL else 100
LONG = {
    "max_steps": 24,
    "orchestrator.batch_size": 512,
    "orchestrator.group_size": 16,
    "checkpoint.interval": 24,
    "trainer.optim.lr": 2e-5,  # what is learnt too fast has no groups left to train on
}


@pytest.fixture(scope="module")
def on_policy(finished, tmp_path_factory):
    """A run that sampled and trained in turns: the one there is or, with full counts, a long one."""
    if not FULL:
        return finished
    home = write(tmp_path_factory.mktemp("long"), steps=3, off_policy=0)
    flags = [word for key, value in LONG.items() for word in (f"--{key}", str(value))]
    done = ask("rl", "@", "rl.toml", *flags, cwd=home, deadline=1200.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return home


@pytest.fixture(scope="module")
def recording(on_policy):
    return BatchRecording(on_policy / "outputs/run/batches")


def test_the_trainer_finds_the_logprobs_that_the_engine_gave(on_policy):
    counts, divergences = (np.array(metrics(on_policy, name)) for name in ("entries", "mismatch_kl"))
    mean, largest = float(counts @ divergences / counts.sum()), max(metrics(on_policy, "max_log_ratio"))
    print(f"{counts.sum():.0f} tokens: mean KL {mean:.2e}, largest |log ratio| {largest:.2e}")
    assert counts.sum() >= TOKENS
    assert max(metrics(on_policy, "staleness/max")) == 0
    assert mean < 1e-8
    assert largest < 1e-3


def test_each_of_the_two_temperatures_holds_it(on_policy):
    for source in ("warm", "cool"):
        found = metrics(on_policy, f"mismatch_kl/{source}/age_0")
        assert found and max(found) < 1e-8


def test_temperatures_that_are_swapped_between_two_sources_are_seen(recording):
    """The control of `mismatch_kl`: with each temperature at the other source it is far from nothing."""
    from ramify.train.build import build_trainer  # torch is loaded here
    from ramify.train.config import TrainerConfig
    from ramify.train.distributed import init_distributed

    with init_distributed(TrainerConfig(threads=1)) as ranks:
        right, swapped = (
            build_trainer(resolve_model_path("tiny"), TrainerConfig(threads=1), ranks)
            .step(batch)
            .to_dict()["mismatch_kl"]
            for batch in (recording.shares(0)[0], _swapped(recording.shares(0)[0]))
        )
    print(f"as sampled {right:.2e}, swapped {swapped:.2e}")
    assert right < 1e-8
    assert swapped > 1e-3


def test_a_batch_with_every_branch_laid_out_whole_has_the_same_gradient(recording, capsys, tmp_path):
    for share in recording.directory.glob(f"step_{recording.steps()[-1]:06}.*"):
        shutil.copy(share, tmp_path)
    forest, flat = (gradient_norms(tmp_path, capsys, tmp_path, *flags) for flags in ([], ["--flat"]))
    print(f"gradient norm {forest[0]:.6g} as a forest, {flat[0]:.6g} flat")
    assert len(flat) == 1 and flat == pytest.approx(forest, rel=1e-4)


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
