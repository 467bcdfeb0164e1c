"""The trainer computes the logprobs that the engine returned, for two temperatures in one batch.

In float32 and without staleness, only rounding errors remain. With RAMIFY_FULL the test covers 1e5 tokens.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from ramify.model.resolve import resolve_model_path
from ramify.trace import Forest
from ramify.train.batch import Batch
from ramify.train.batch_source import BatchRecording
from tests.rl.run_helpers import FULL, metrics, replay_gradient_norms, run_command, write_config

TOKENS = 100_000 if FULL else 100
LONG = {
    "max_steps": 24,
    "orchestrator.batch_size": 512,
    "orchestrator.group_size": 16,
    "checkpoint.interval": 24,
    "trainer.optim.lr": 2e-5,  # a run that learns too fast has no trainable groups left
}


@pytest.fixture(scope="module")
def on_policy(finished, tmp_path_factory):
    """Return a run that alternated sampling and training: the shared one or, with RAMIFY_FULL, a long one."""
    if not FULL:
        return finished
    home = write_config(tmp_path_factory.mktemp("long"), steps=3, off_policy=0)
    flags = [argument for key, value in LONG.items() for argument in (f"--{key}", str(value))]
    result = run_command("rl", "@", "rl.toml", *flags, cwd=home, timeout=1200.0)
    assert result.returncode == 0, result.stdout + result.stderr
    return home


@pytest.fixture(scope="module")
def recording(on_policy):
    return BatchRecording(on_policy / "outputs/run/batches")


def test_trainer_computes_the_logprobs_of_the_engine(on_policy):
    counts, divergences = (np.array(metrics(on_policy, name)) for name in ("entries", "mismatch_kl"))
    mean, largest = float(counts @ divergences / counts.sum()), max(metrics(on_policy, "max_log_ratio"))
    print(f"{counts.sum():.0f} tokens: mean KL {mean:.2e}, largest |log ratio| {largest:.2e}")
    assert counts.sum() >= TOKENS
    assert max(metrics(on_policy, "staleness/max")) == 0
    assert mean < 1e-8
    assert largest < 1e-3


def test_logprobs_agree_for_each_temperature(on_policy):
    for source in ("warm", "cool"):
        divergences = metrics(on_policy, f"mismatch_kl/{source}/age_0")
        assert divergences and max(divergences) < 1e-8


def test_swapped_temperatures_raise_mismatch_kl(recording):
    """A control of `mismatch_kl`: with swapped temperatures it is large."""
    from ramify.train.build import build_trainer  # imports torch
    from ramify.train.config import TrainerConfig
    from ramify.train.distributed import init_distributed

    with init_distributed(TrainerConfig(threads=1)) as ranks:
        original, swapped = (
            build_trainer(resolve_model_path("tiny"), TrainerConfig(threads=1), ranks)
            .step(batch)
            .to_dict()["mismatch_kl"]
            for batch in (recording.read_shares(0)[0], _swap_temperatures(recording.read_shares(0)[0]))
        )
    print(f"as sampled {original:.2e}, swapped {swapped:.2e}")
    assert original < 1e-8
    assert swapped > 1e-3


@pytest.mark.skipif(not FULL, reason="tests/rl/test_replay.py does the same with the short run")
def test_flat_batch_has_the_same_gradient(recording, capsys, tmp_path):
    for share in recording.directory.glob(f"step_{recording.list_steps()[-1]:06}.*"):
        shutil.copy(share, tmp_path)
    forest, flat = (replay_gradient_norms(tmp_path, capsys, tmp_path, *flags) for flags in ([], ["--flat"]))
    print(f"gradient norm {forest[0]:.6g} as a forest, {flat[0]:.6g} flat")
    assert len(flat) == 1 and flat == pytest.approx(forest, rel=1e-4)


def _swap_temperatures(batch: Batch) -> Batch:
    """Return the batch with the two temperatures swapped."""
    temperatures = {float(value) for pack in batch.packs for value in pack.calls["temperature"]}
    assert temperatures == {1.0, float(np.float32(0.7))}
    return replace(batch, packs=[_swap_in_pack(pack) for pack in batch.packs])


def _swap_in_pack(pack: Forest) -> Forest:
    calls = pack.calls.copy()
    warm = calls["temperature"] == 1.0
    calls["temperature"] = np.where(warm, np.float32(0.7), np.float32(1.0))
    return replace(pack, calls=calls)
