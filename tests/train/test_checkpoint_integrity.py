"""A damaged checkpoint is refused by name before anything of it is read, and never runs code."""

import contextlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from ramify.cli import main
from ramify.errors import CheckpointRefused
from ramify.train.build import build_trainer
from ramify.train.checkpoint import CheckpointManager
from ramify.train.checkpoint_manifest import CheckpointManifest, checksum_files
from ramify.train.config import TrainerConfig
from ramify.train.distributed import Ranks, init_distributed
from ramify.train.sft import SftConfig, run_sft
from tests.train.batched import random_batches
from tests.train.models import CONFIGS, made
from tests.train.orchestrator import Orchestrator
from tests.train.test_process import arguments
from tests.train.test_sft import settings, world
from tests.train.workers import run_ranks

__all__ = ["world"]  # a fixture

ALONE = Ranks(torch.device("cpu"))
CONFIG = TrainerConfig(pack_tokens=128, threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("integrity") / "model"
    made(CONFIGS["llama"], "eager").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> Path:
    """Checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    trainer = build_trainer(model, CONFIG, ALONE)
    checkpoints = CheckpointManager(folder, ALONE)
    for step, batch in zip((2, 4), random_batches(2), strict=True):
        trainer.step(batch)
        checkpoints.save(trainer, step, {"seen": step})
    return folder


@pytest.fixture
def checkpoints(saved, tmp_path) -> CheckpointManager:
    return CheckpointManager(Path(shutil.copytree(saved, tmp_path / "run" / "checkpoints")), ALONE)


@pytest.fixture(scope="module")
def trainer(model):
    return build_trainer(model, CONFIG, ALONE)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 0x10]))


def state(trainer) -> dict[str, torch.Tensor]:
    return {name: master.detach().clone() for name, master in trainer.masters.named()}


DAMAGES = {
    "zeroed page of weights": ("__0_0.distcp", lambda path: overwrite(path, 8192, bytes(4096))),
    "flipped weight": ("__0_0.distcp", lambda path: flip(path, path.stat().st_size // 2)),
    "lost end": ("__0_0.distcp", lambda path: os.truncate(path, path.stat().st_size - 4096)),
    "lost file": ("__0_0.distcp", Path.unlink),
    "flipped metadata": (".metadata", lambda path: flip(path, path.stat().st_size // 2)),
    "empty metadata": (".metadata", lambda path: path.write_bytes(b"")),
    "flipped note": ("checkpoint.json", lambda path: flip(path, path.read_bytes().index(b'"seen"') + 7)),
    "note that is no JSON": ("checkpoint.json", lambda path: path.write_bytes(b"\xff\xfe{")),
    "note of another kind": ("checkpoint.json", lambda path: path.write_text("[1, 2]")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_newest_whole_one_is_offered(checkpoints, trainer, damage):
    name, apply = DAMAGES[damage]
    path = checkpoints.path(4) / name
    apply(path)
    before = state(trainer)
    with pytest.raises(CheckpointRefused) as refused:
        checkpoints.load(trainer, 4)
    assert name in refused.value.message
    assert f"ramify rollback {checkpoints.directory.parent} 2" in refused.value.message
    assert all(torch.equal(master, before[key]) for key, master in state(trainer).items())
    assert checkpoints.load(trainer, 2) == {"seen": 2}


def test_a_damaged_older_checkpoint_is_not_offered(checkpoints, trainer):
    for step in (2, 4):
        overwrite(checkpoints.path(step) / "__0_0.distcp", 8192, bytes(4096))
    with pytest.raises(CheckpointRefused, match="no other checkpoint") as refused:
        checkpoints.load(trainer, 4)
    assert "rollback" not in refused.value.message


class Exploit:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("checksummed", [True, False])
def test_metadata_never_runs_code_even_if_its_checksum_is_right(checkpoints, trainer, tmp_path, checksummed):
    place = checkpoints.path(4)
    (place / ".metadata").write_bytes(pickle.dumps(Exploit(tmp_path / "ran")))
    if checksummed:
        seal(place)
    else:
        forget_checksums(place)
    with pytest.raises(CheckpointRefused, match=r"posix\.mkdir"):
        checkpoints.load(trainer, 4)
    assert not (tmp_path / "ran").exists()


def seal(place: Path) -> None:
    """Write the manifest anew, as whoever can write the directory could."""
    files = checksum_files(path for path in place.iterdir() if path.name != "checkpoint.json")
    CheckpointManifest(step=4, optimizer="adamw", note={}, files=files).write(place)


def forget_checksums(place: Path) -> None:
    """Make the note what versions without checksums wrote."""
    note = json.loads((place / "checkpoint.json").read_text())
    (place / "checkpoint.json").write_text(json.dumps({key: note[key] for key in ("step", "optimizer", "note")}))


def test_a_checkpoint_of_a_version_without_checksums_loads_with_a_warning(checkpoints, trainer):
    forget_checksums(checkpoints.path(4))
    lines = []
    told = CheckpointManager(checkpoints.directory, ALONE, warn=lines.append)
    assert told.load(trainer, 4) == {"seen": 4}
    assert [line for line in lines if "step_000004" in line and "no checksums" in line] == lines != []
    (checkpoints.path(4) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointRefused, match="step_000004"):
        told.load(trainer, 4)


def refuse_as_rank(model: Path, folder: Path) -> None:
    with init_distributed(CONFIG) as ranks:
        trainer = build_trainer(model, CONFIG, ranks)
        checkpoints = CheckpointManager(folder / "checkpoints", ranks)
        for step in (1, 2):
            checkpoints.save(trainer, step)
        if ranks.is_first:
            overwrite(checkpoints.path_for(2) / "__1_0.distcp", 4096, bytes(4096))
        ranks.barrier()
        with contextlib.suppress(CheckpointRefused):
            try:
                checkpoints.load(trainer, 2)
            except CheckpointRefused as error:
                (folder / f"rank_{ranks.rank}").write_text(error.message)
                raise
        checkpoints.load(trainer, 1)


def test_every_rank_writes_its_checksums_and_all_fail_together(model, tmp_path):
    run_ranks(2, refuse_as_rank, model, tmp_path)
    note = json.loads((tmp_path / "checkpoints" / "step_000001" / "checkpoint.json").read_text())
    assert sorted(note["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    messages = [(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)]
    assert messages[0] == messages[1]
    assert "__1_0.distcp" in messages[0]
    assert f"ramify rollback {tmp_path} 1" in messages[0]


def test_a_trainer_whose_committed_checkpoint_is_damaged_ends_by_name_and_removes_nothing(model, tmp_path, capsys):
    folder = tmp_path / "trainer" / "checkpoints"
    with Orchestrator(random_batches(4)) as orchestrator:
        assert main(arguments(model, tmp_path, "--address", orchestrator.address)) == 0
        assert orchestrator.commits == [2, 4]
        flip(folder / "step_000004" / "__0_0.distcp", 9000)
        assert main(arguments(model, tmp_path, "--address", orchestrator.address)) == 1
        assert orchestrator.committed == 4
    assert "CheckpointRefused" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["step_000002", "step_000004"]


def learn(world: Path, name: str, epochs: int):
    more = {"epochs": epochs, "batch_size": 12, "checkpoint": {"interval": 2, "keep_last": 9}}
    plain = {"threads": 1, "pack_tokens": 128, "optim": {"lr": 3e-3}}
    return run_sft(SftConfig.model_validate({**settings(world, name), **more, "trainer": plain}))


def test_an_sft_run_goes_on_from_an_older_checkpoint_only_when_it_is_told_to(world, capsys):
    whole = learn(world, "undamaged", 2)
    assert learn(world, "damaged", 1).steps == 3
    path = world / "runs" / "damaged"
    (path / "checkpoints" / "step_000003" / "checkpoint.json").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointRefused, match=f"ramify rollback {path} 2"):
            learn(world, "damaged", 2)
    assert main(["rollback", str(path), "3"]) == 1
    assert main(["rollback", str(path), "2"]) == 0
    out = capsys.readouterr().out
    assert f"{path} goes on from step 2" in out
    assert (path / "checkpoints" / "rolled_back_1.step_000003").is_dir()
    again = learn(world, "damaged", 2)
    assert (again.steps, again.steps_run) == (6, 4)
    assert weights(again) == weights(whole)


def weights(result) -> bytes:
    return (result.weights / "model.safetensors").read_bytes()
