"""A checkpoint brings a trainer back bit for bit; halves are never picked; a full disk is named and costs nothing."""

import shutil
from pathlib import Path

import pytest
import torch

from ramify.errors import CheckpointRefused, StorageFull
from ramify.train.build import build_trainer
from ramify.train.checkpoint import CheckpointManager
from ramify.train.config import TrainerConfig
from ramify.train.distributed import Ranks
from tests.train.batched import random_batches
from tests.train.models import CONFIGS, made

ALONE = Ranks(torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    made(CONFIGS["llama"], "eager").save_pretrained(path)
    return path


def trainer_of(model: Path, optimizer: str = "adamw", **more):
    optim = {"type": optimizer, "lr": 1e-3, "schedule": {"type": "linear", "warmup_steps": 2}}
    return build_trainer(model, TrainerConfig(pack_tokens=128, optim=optim, **more), ALONE, total_steps=20)


def state(trainer) -> dict[str, torch.Tensor]:
    return {name: master.detach().clone() for name, master in trainer.masters.named()}


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("adamw", "float32"), ("adamw", "bfloat16"), ("muon", "float32")], ids=str
)
def test_a_trainer_goes_on_as_if_it_had_never_stopped(model, tmp_path, optimizer, dtype):
    batches = random_batches(4)
    ours = trainer_of(model, optimizer, dtype=dtype)
    checkpoints = CheckpointManager(tmp_path, ALONE)
    for batch in batches[:2]:
        ours.step(batch)
    torch.manual_seed(5)
    checkpoints.save(ours, 2, {"seen": 7})
    drawn = torch.rand(3)
    whole = [ours.step(batch) for batch in batches[2:]]

    again = trainer_of(model, optimizer, dtype=dtype)
    assert checkpoints.load(again, 2) == {"seen": 7} == checkpoints.read_note(2)
    assert torch.equal(torch.rand(3), drawn)
    for batch, before in zip(batches[2:], whole, strict=True):
        after = again.step(batch)
        assert (after.loss, after.grad_norm, after.lr) == (before.loss, before.grad_norm, before.lr)
    assert all(torch.equal(master, state(ours)[name]) for name, master in state(again).items())


def test_only_whole_checkpoints_count_and_old_ones_go(model, tmp_path):
    trainer = trainer_of(model)
    checkpoints = CheckpointManager(tmp_path / "checkpoints", ALONE)
    assert checkpoints.list_steps() == []
    for step in (2, 4, 6, 8):
        checkpoints.save(trainer, step)
    (checkpoints.path_for(8) / "checkpoint.json").unlink()  # as if it had been copied by halves
    (tmp_path / "checkpoints" / ".step_000010.partial").mkdir()
    assert checkpoints.list_steps() == [2, 4, 6]
    checkpoints.remove_all_but_last(2)
    assert checkpoints.list_steps() == [4, 6]
    checkpoints.remove_after(4)
    assert checkpoints.list_steps() == [4]
    assert not list((tmp_path / "checkpoints").glob(".*"))
    assert checkpoints.save(trainer, 8) == checkpoints.path_for(8)
    assert checkpoints.list_steps() == [4, 8]  # the half was none
    assert checkpoints.save(trainer, 4) == checkpoints.path_for(4)  # there already


def test_a_checkpoint_of_something_else_is_refused(model, tmp_path):
    checkpoints = CheckpointManager(tmp_path, ALONE)
    checkpoints.save(trainer_of(model), 1)
    with pytest.raises(CheckpointRefused, match="written by adamw, this run has muon"):
        checkpoints.load(trainer_of(model, "muon"), 1)
    with pytest.raises(CheckpointRefused, match="of another model"):
        checkpoints.load(trainer_of(model, lora={"enabled": True, "rank": 2}), 1)
    with pytest.raises(CheckpointRefused, match="step_000002"):
        checkpoints.load(trainer_of(model), 2)
    (tmp_path / "step_000001" / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointRefused):
        checkpoints.load(trainer_of(model), 1)


def test_a_full_disk_is_named_and_the_checkpoint_before_it_stays(model, small_disk):
    trainer = trainer_of(model)
    trainer.step(random_batches(1)[0])
    checkpoints = CheckpointManager(small_disk / "checkpoints", ALONE)
    checkpoints.save(trainer, 1)
    kept = state(trainer)
    ballast = small_disk / "ballast"
    for left in (300_000, 5_000, 0):
        ballast.write_bytes(b"")
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - left))
        with pytest.raises(StorageFull, match="checkpoints"):
            checkpoints.save(trainer, 2)
        assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step_000001"]
    trainer.step(random_batches(2)[1])  # the run goes on
    checkpoints.load(trainer, 1)
    assert all(torch.equal(master, kept[name]) for name, master in state(trainer).items())
    ballast.unlink()
    checkpoints.remove_all_but_last(1)
