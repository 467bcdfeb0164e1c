"""Versions appear whole, stay while somebody needs them, and are named by incarnation and step."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from ramify.model import Manifest, PolicyVersion
from ramify.model.manifest import verify_weights
from ramify.train.build import build_trainer
from ramify.train.config import TrainerConfig
from ramify.train.distributed import Ranks
from ramify.train.publisher import WeightPublisher, iter_merged_weights
from tests.train.batched import random_batches
from tests.train.models import CONFIGS, made

ALONE = Ranks(torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("publish") / "model"
    made(CONFIGS["llama"], "eager").save_pretrained(path)
    return path


def trainer_of(model: Path, dtype: str = "float32"):
    return build_trainer(model, TrainerConfig(pack_tokens=128, dtype=dtype, optim={"lr": 1e-3}), ALONE)


def publisher_of(model: Path, folder: Path, dtype: torch.dtype = torch.float32) -> WeightPublisher:
    return WeightPublisher(folder, ALONE, policy="p", base_model=model, dtype=dtype)


def test_a_version_is_the_masters_and_fits_the_model(model, tmp_path):
    trainer = trainer_of(model, "bfloat16")
    trainer.step(random_batches(1)[0])
    published = publisher_of(model, tmp_path, torch.bfloat16).publish(trainer, 2, 1)
    assert published.seconds > 0
    assert published.bytes == sum(value.nbytes for _, value in iter_merged_weights(trainer)) // 2
    assert verify_weights(published.path, reference_model=model).version == PolicyVersion("p", 2, 1)
    state = trainer.policy.model.state_dict()  # the rounded copies that the trainer computes with
    from safetensors.torch import load_file

    for name, value in load_file(published.path / "model.safetensors").items():
        assert torch.equal(value, state[name]), name


def test_versions_go_only_when_nobody_needs_them(model, tmp_path):
    trainer, publisher = trainer_of(model), publisher_of(model, tmp_path)
    (tmp_path / ".0-000009.123").mkdir()
    for incarnation, step in [(0, 1), (0, 2), (0, 10), (1, 2)]:
        publisher.publish(trainer, incarnation, step)
    publisher.prune([PolicyVersion("p", 0, 2)])
    assert publisher.list_versions() == [PolicyVersion("p", 0, 2), PolicyVersion("p", 1, 2)]
    publisher.prune([])
    assert publisher.list_versions() == [PolicyVersion("p", 1, 2)]
    assert Manifest.read(publisher.path_for(1, 2)).version == PolicyVersion("p", 1, 2)
    publisher_of(model, tmp_path)  # what an interrupted one left is cleared
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_config_names_the_dtype_that_the_weights_have_and_the_umask_decides_who_may_read(model, tmp_path, stored):
    base = Path(shutil.copytree(model, tmp_path / "base"))
    settings = json.loads((base / "config.json").read_text())
    other = {"float32": "bfloat16", "bfloat16": "float32"}[stored]
    (base / "config.json").write_text(json.dumps({**settings, "dtype": other, "torch_dtype": other}))
    before = os.umask(0o027)
    try:
        published = publisher_of(base, tmp_path / "weights", getattr(torch, stored)).publish(trainer_of(model), 0, 1)
    finally:
        os.umask(before)
    written = json.loads((published.path / "config.json").read_text())
    assert written == {**settings, "dtype": stored, "torch_dtype": stored}
    from safetensors.torch import load_file

    assert {str(each.dtype) for each in load_file(published.path / "model.safetensors").values()} == {f"torch.{stored}"}
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in published.path.iterdir()}
    assert modes == dict.fromkeys(modes, "0o640")
