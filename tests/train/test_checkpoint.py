"""A checkpoint restores a trainer bit for bit, incomplete ones are ignored, and a full disk costs nothing."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from ramify.core.errors import CheckpointRefused, StorageFull
from ramify.run.fencing.token import FencingToken
from ramify.train.build import build_trainer
from ramify.train.checkpoint import CheckpointManager
from ramify.train.checkpoint_manifest import compute_manifest_digest, list_checkpoints
from ramify.train.config import CheckpointConfig, TrainerConfig
from tests.support.training import SINGLE_RANK, copy_weights, random_batches


def make_trainer(model: Path, optimizer: str = "adamw", **settings):
    optim = {"type": optimizer, "lr": 1e-3, "schedule": {"type": "linear", "warmup_steps": 2}}
    config = TrainerConfig.model_validate({"pack_tokens": 128, "optim": optim, **settings})
    return build_trainer(model, config, SINGLE_RANK, total_steps=20)


@pytest.mark.promise
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ("adamw", "float32"),
        pytest.param("adamw", "bfloat16", marks=pytest.mark.full("five seconds where bfloat16 is emulated")),
        ("muon", "float32"),
    ],
    ids=str,
)
def test_a_restored_trainer_continues_exactly(model, tmp_path, optimizer, dtype):
    first, second = random_batches(2)
    trainer = make_trainer(model, optimizer, dtype=dtype)
    checkpoints = CheckpointManager(tmp_path, SINGLE_RANK)
    trainer.step(first)
    torch.manual_seed(5)
    checkpoints.save(trainer, 1, {"seen": 7})
    random_numbers = torch.rand(3)
    expected = trainer.step(second)

    restored = make_trainer(model, optimizer, dtype=dtype)
    assert checkpoints.load(restored, 1) == {"seen": 7} == checkpoints.read_note(1)
    assert torch.equal(torch.rand(3), random_numbers)
    actual = restored.step(second)
    assert (actual.loss, actual.grad_norm, actual.lr) == (expected.loss, expected.grad_norm, expected.lr)
    assert all(torch.equal(master, copy_weights(trainer)[name]) for name, master in copy_weights(restored).items())


def test_checkpoints_hold_float32_whatever_the_representation_of_the_masters(model, tmp_path):
    split, joined = make_trainer(model, dtype="bfloat16"), make_trainer(model)
    masters = split.master_weights
    assert masters.is_split
    generator = torch.Generator().manual_seed(0)
    for parameter in masters.parameters():
        masters.set_float32(parameter, (), torch.randn(parameter.shape, generator=generator))
    expected = copy_weights(split)
    CheckpointManager(tmp_path / "split", SINGLE_RANK).save(split, 1)
    CheckpointManager(tmp_path / "split", SINGLE_RANK).load(joined, 1)
    CheckpointManager(tmp_path / "joined", SINGLE_RANK).save(joined, 1)
    restored = make_trainer(model, dtype="bfloat16")
    CheckpointManager(tmp_path / "joined", SINGLE_RANK).load(restored, 1)
    for trainer in (joined, restored):
        assert all(torch.equal(value, expected[name]) for name, value in copy_weights(trainer).items())
    for parameter, other in zip(restored.policy.parameters(), split.policy.parameters()):
        assert torch.equal(parameter, other)


def test_incomplete_checkpoints_are_ignored_and_old_ones_are_removed(model, tmp_path):
    trainer = make_trainer(model)
    checkpoints = CheckpointManager(tmp_path / "checkpoints", SINGLE_RANK)
    assert checkpoints.list_steps() == []
    for step in (2, 4, 6, 8):
        checkpoints.save(trainer, step)
    (checkpoints.path_for(8) / "checkpoint.json").unlink()  # as after an incomplete copy
    (tmp_path / "checkpoints" / ".step_000010.partial").mkdir()
    assert checkpoints.list_steps() == [2, 4, 6]
    checkpoints.remove_before(6, CheckpointConfig(keep_last=2), {})
    assert checkpoints.list_steps() == [4, 6]
    checkpoints.remove_after(4)
    assert checkpoints.list_steps() == [4]
    assert not list((tmp_path / "checkpoints").glob(".*"))
    assert checkpoints.save(trainer, 8) == checkpoints.path_for(8)
    assert checkpoints.list_steps() == [4, 8]  # the incomplete one was replaced
    assert checkpoints.save(trainer, 4) == checkpoints.path_for(4)  # it exists already


def test_the_best_checkpoint_and_those_of_an_interval_are_kept(model, tmp_path):
    trainer = make_trainer(model)
    checkpoints = CheckpointManager(tmp_path, SINGLE_RANK)
    config = CheckpointConfig(interval=2, keep_last=1, keep_interval=8, keep_best="eval/held-out/avg")
    values = {0: 9.0, 4: 0.5, 6: 0.75, 10: 0.25, 12: math.nan}
    for step in range(2, 15, 2):
        checkpoints.save(trainer, step)
        checkpoints.remove_before(step, config, {at: value for at, value in values.items() if at < step})
    assert checkpoints.list_steps() == [6, 8, 14]  # the best, the interval's, the last
    assert config.count_kept(7) == 3
    loss = config.model_copy(update={"keep_best": "validation/loss"})
    assert loss.choose_kept_steps([4, 6, 8, 10, 14], values) == {8, 10, 14}
    with pytest.raises(ValueError, match="keep_interval must be a multiple of interval = 50, got 60"):
        CheckpointConfig(keep_interval=60)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(model, tmp_path):
    checkpoints = CheckpointManager(tmp_path, SINGLE_RANK)
    checkpoints.save(make_trainer(model), 1)
    with pytest.raises(CheckpointRefused, match="written by adamw, this run has muon"):
        checkpoints.load(make_trainer(model, "muon"), 1)
    with pytest.raises(CheckpointRefused, match="of another model"):
        checkpoints.load(make_trainer(model, lora={"enabled": True, "rank": 2}), 1)
    with pytest.raises(CheckpointRefused, match="step_000002"):
        checkpoints.load(make_trainer(model), 2)
    (tmp_path / "step_000001" / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointRefused):
        checkpoints.load(make_trainer(model), 1)


@pytest.mark.process
def test_a_full_disk_raises_storage_full_and_earlier_checkpoints_stay(model, small_disk):
    trainer = make_trainer(model)
    trainer.step(random_batches(1)[0])
    checkpoints = CheckpointManager(small_disk / "checkpoints", SINGLE_RANK)
    checkpoints.save(trainer, 1)
    saved_weights = copy_weights(trainer)
    filler_file = small_disk / "filler"
    for free_bytes in (300_000, 5_000, 0):
        filler_file.write_bytes(b"")
        filler_file.write_bytes(bytes(shutil.disk_usage(small_disk).free - free_bytes))
        with pytest.raises(StorageFull, match="checkpoints"):
            checkpoints.save(trainer, 2)
        assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step_000001"]
    trainer.step(random_batches(2)[1])  # the run continues
    checkpoints.load(trainer, 1)
    assert all(torch.equal(master, saved_weights[name]) for name, master in copy_weights(trainer).items())
    filler_file.unlink()
    checkpoints.remove_before(1, CheckpointConfig(keep_last=1), {})


@pytest.mark.process
def test_a_disk_with_room_for_two_checkpoints_keeps_the_last_one_until_the_next_is_complete(model, small_disk):
    trainer, lines = make_trainer(model), list[str]()
    trainer.step(random_batches(1)[0])
    checkpoints = CheckpointManager(small_disk / "checkpoints", SINGLE_RANK, warn=lines.append)
    size = sum(file.stat().st_size for file in checkpoints.save(trainer, 1).iterdir())
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - size * 3 // 2))
    checkpoints.save(trainer, 2, committed=1)
    checkpoints.save(trainer, 3, committed=2)  # only without the first one
    assert checkpoints.list_steps() == [2, 3]
    (line,) = lines
    assert "no room for a checkpoint" in line
    assert line.endswith("; checkpoints before step 2 are removed to make room")
    checkpoints.remove_before(3, CheckpointConfig(keep_last=1), {})
    (small_disk / "more").write_bytes(bytes(size))
    with pytest.raises(StorageFull, match=r"MiB needed, .* MiB free"):
        checkpoints.save(trainer, 4, committed=3)
    assert checkpoints.list_steps() == [3]


def test_copy_of_a_trainer_neither_uses_nor_removes_checkpoints_of_a_newer_one(model, tmp_path):
    trainer = make_trainer(model)
    old, new = (CheckpointManager(tmp_path, SINGLE_RANK, token=FencingToken(0, number)) for number in (1, 2))
    old.save(trainer, 2)
    assert old.save(trainer, 4) != new.save(trainer, 4)
    (tmp_path / ".step_000006-2.partial").mkdir()
    new.save(trainer, 6)
    (tmp_path / ".step_000008-2.partial").mkdir()
    old.remove_after(0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step_000008-2.partial",
        "step_000004-2",
        "step_000006-2",
    ]


def test_committed_checkpoint_is_kept_although_a_replaced_trainer_saved_later_ones(model, tmp_path):
    trainer = make_trainer(model)
    old, new = (CheckpointManager(tmp_path, SINGLE_RANK, token=FencingToken(0, number)) for number in (1, 2))
    for checkpoints, step in ((old, 2), (new, 4), (old, 6), (old, 8)):
        checkpoints.save(trainer, step)
    new.remove_before(4, CheckpointConfig(keep_last=1), {})
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000004-2", "step_000006-1", "step_000008-1"]
    new.remove_after(4)  # what the next trainer does first
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000004-2"]


def test_only_the_committed_checkpoint_is_loaded(model, tmp_path):
    trainer = make_trainer(model)
    committed, other = (
        CheckpointManager(tmp_path, SINGLE_RANK, token=FencingToken(0, number)).save(trainer, 2, {"by": number})
        for number in (1, 2)
    )
    digest = compute_manifest_digest(committed)
    checkpoints = CheckpointManager(tmp_path, SINGLE_RANK, token=FencingToken(1, 0))
    assert checkpoints.load(trainer, 2, name=committed.name, digest=digest) == {"by": 1}
    with pytest.raises(CheckpointRefused, match="step_000002-2 is not the checkpoint that was committed"):
        checkpoints.load(trainer, 2, name=other.name, digest=digest)
