"""A damaged checkpoint is refused before anything is loaded, and never runs code."""

import contextlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from ramify.cli import main
from ramify.core.errors import CheckpointRefused
from ramify.train.build import build_trainer
from ramify.train.checkpoint import CheckpointManager
from ramify.train.checkpoint_manifest import CheckpointManifest, checksum_files
from ramify.train.config import TrainerConfig
from ramify.train.distributed import init_distributed
from ramify.train.sft import SftConfig, run_sft
from tests.support.trainer import FakeOrchestrator, run_ranks
from tests.support.training import SINGLE_RANK, copy_weights, random_batches
from tests.train.test_sft import settings, world
from tests.train.test_training_loop import arguments

__all__ = ["world"]  # a fixture

CONFIG = TrainerConfig(pack_tokens=128, threads=1)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> Path:
    """Checkpoints of steps 2 and 4."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    trainer = build_trainer(model, CONFIG, SINGLE_RANK)
    checkpoints = CheckpointManager(directory, SINGLE_RANK)
    for step, batch in zip((2, 4), random_batches(2), strict=True):
        trainer.step(batch)
        checkpoints.save(trainer, step, {"seen": step})
    return directory


@pytest.fixture
def checkpoints(saved, tmp_path) -> CheckpointManager:
    return CheckpointManager(Path(shutil.copytree(saved, tmp_path / "run" / "checkpoints")), SINGLE_RANK)


@pytest.fixture(scope="module")
def trainer(model):
    return build_trainer(model, CONFIG, SINGLE_RANK)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip_bit(path: Path, offset: int) -> None:
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 0x10]))


DAMAGES = {
    "zeroed page of weights": ("__0_0.distcp", lambda path: overwrite(path, 8192, bytes(4096))),
    "flipped weight": ("__0_0.distcp", lambda path: flip_bit(path, path.stat().st_size // 2)),
    "truncated file": ("__0_0.distcp", lambda path: os.truncate(path, path.stat().st_size - 4096)),
    "missing file": ("__0_0.distcp", Path.unlink),
    "flipped metadata": (".metadata", lambda path: flip_bit(path, path.stat().st_size // 2)),
    "empty metadata": (".metadata", lambda path: path.write_bytes(b"")),
    "flipped note": ("checkpoint.json", lambda path: flip_bit(path, path.read_bytes().index(b'"seen"') + 7)),
    "manifest that is not JSON": ("checkpoint.json", lambda path: path.write_bytes(b"\xff\xfe{")),
    "manifest of another type": ("checkpoint.json", lambda path: path.write_text("[1, 2]")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_newest_intact_one_is_suggested(checkpoints, trainer, damage):
    name, apply = DAMAGES[damage]
    path = checkpoints.path_for(4) / name
    apply(path)
    before = copy_weights(trainer)
    with pytest.raises(CheckpointRefused) as caught:
        checkpoints.load(trainer, 4)
    assert name in caught.value.message
    assert f"ramify rollback {checkpoints.directory.parent} 2" in caught.value.message
    assert all(torch.equal(master, before[key]) for key, master in copy_weights(trainer).items())
    assert checkpoints.load(trainer, 2) == {"seen": 2}


def test_a_damaged_older_checkpoint_is_not_suggested(checkpoints, trainer):
    for step in (2, 4):
        overwrite(checkpoints.path_for(step) / "__0_0.distcp", 8192, bytes(4096))
    with pytest.raises(CheckpointRefused, match="no other checkpoint") as caught:
        checkpoints.load(trainer, 4)
    assert "rollback" not in caught.value.message


class Exploit:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_metadata_never_runs_code_even_with_a_valid_checksum(checkpoints, trainer, tmp_path):
    path = checkpoints.path_for(4)
    (path / ".metadata").write_bytes(pickle.dumps(Exploit(tmp_path / "ran")))
    rewrite_manifest(path)
    with pytest.raises(CheckpointRefused, match=r"posix\.mkdir"):
        checkpoints.load(trainer, 4)
    assert not (tmp_path / "ran").exists()


def rewrite_manifest(path: Path) -> None:
    """Write a new valid manifest, as an attacker with access to the directory could."""
    files = checksum_files(file for file in path.iterdir() if file.name != "checkpoint.json")
    CheckpointManifest(step=4, optimizer="adamw", note={}, files=files).write(path)


def test_a_checkpoint_without_checksums_is_refused(checkpoints, trainer):
    file = checkpoints.path_for(4) / "checkpoint.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({key: manifest[key] for key in ("step", "optimizer", "note")}))
    with pytest.raises(CheckpointRefused, match=r"checkpoint\.json is damaged.*`files`"):
        checkpoints.load(trainer, 4)


def load_damaged_as_rank(model: Path, directory: Path) -> None:
    with init_distributed(CONFIG) as ranks:
        trainer = build_trainer(model, CONFIG, ranks)
        checkpoints = CheckpointManager(directory / "checkpoints", ranks)
        for step in (1, 2):
            checkpoints.save(trainer, step)
        if ranks.is_first:
            overwrite(checkpoints.path_for(2) / "__1_0.distcp", 4096, bytes(4096))
        ranks.barrier()
        with contextlib.suppress(CheckpointRefused):
            try:
                checkpoints.load(trainer, 2)
            except CheckpointRefused as error:
                (directory / f"rank_{ranks.rank}").write_text(error.message)
                raise
        checkpoints.load(trainer, 1)


@pytest.mark.process
@pytest.mark.full("test_distributed.py has two ranks that save and load")
def test_every_rank_writes_its_checksums_and_all_ranks_refuse_together(model, tmp_path):
    run_ranks(2, load_damaged_as_rank, model, tmp_path)
    manifest = json.loads((tmp_path / "checkpoints" / "step_000001" / "checkpoint.json").read_text())
    assert sorted(manifest["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    messages = [(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)]
    assert messages[0] == messages[1]
    assert "__1_0.distcp" in messages[0]
    assert f"ramify rollback {tmp_path} 1" in messages[0]


def test_a_trainer_whose_committed_checkpoint_is_damaged_fails_and_removes_nothing(model, tmp_path, capsys):
    directory = tmp_path / "trainer" / "checkpoints"
    with FakeOrchestrator(random_batches(4)) as orchestrator:
        assert main(arguments(model, tmp_path, "--address", orchestrator.address)) == 0
        assert orchestrator.commits == [2, 4]
        flip_bit(directory / "step_000004-0" / "__0_0.distcp", 9000)
        assert main(arguments(model, tmp_path, "--address", orchestrator.address)) == 1
        assert orchestrator.committed == 4
    assert "CheckpointRefused" in capsys.readouterr().err
    assert sorted(path.name for path in directory.iterdir()) == ["step_000002-0", "step_000004-0"]


def train(world: Path, name: str, epochs: int):
    overrides = {"epochs": epochs, "batch_size": 12, "checkpoint": {"interval": 2, "keep_last": 9}}
    trainer = {"threads": 1, "pack_tokens": 128, "optim": {"lr": 3e-3}}
    return run_sft(SftConfig.model_validate({**settings(world, name), **overrides, "trainer": trainer}))


def test_an_sft_run_continues_from_an_older_checkpoint_only_after_a_rollback(world, capsys):
    expected = train(world, "undamaged", 2)
    assert train(world, "damaged", 1).steps == 3
    path = world / "runs" / "damaged"
    (path / "checkpoints" / "step_000003" / "checkpoint.json").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointRefused, match=f"ramify rollback {path} 2"):
            train(world, "damaged", 2)
    assert main(["rollback", str(path), "3"]) == 1
    assert main(["rollback", str(path), "2"]) == 0
    out = capsys.readouterr().out
    assert f"{path} is rolled back to step 2; resume with: ramify sft @ {path}/config.toml" in out
    assert (path / "checkpoints" / "rolled_back_1.step_000003").is_dir()
    result = train(world, "damaged", 2)
    assert (result.steps, result.steps_run) == (6, 4)
    assert read_weights(result) == read_weights(expected)


def read_weights(result) -> bytes:
    return (result.weights / "model.safetensors").read_bytes()
