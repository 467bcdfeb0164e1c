"""Published versions are complete, stay while they are needed, and are named by incarnation and step."""

import json
import math
import os
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ramify.core.errors import StorageFailed
from ramify.infer.weight_loader import WeightLoader
from ramify.model import Manifest
from ramify.model.load import load_engine_model
from ramify.model.render.tokenizer import Tokenizer
from ramify.model.shared_weights import Announcement
from ramify.model.weights import apply_weights, get_untied_tensors, stage_weights
from ramify.model.weights_manifest import verify_weights
from ramify.trace import PolicyVersion
from ramify.train.build import build_trainer
from ramify.train.config import TrainerConfig
from ramify.train.distributed import Ranks
from ramify.train.memory import ModelSize
from ramify.train.publisher import WeightPublisher, iter_merged_weights
from tests.support.models import QWEN3_5, write_qwen3_5_with_images
from tests.support.training import SINGLE_RANK, random_batches


def make_trainer(model: Path, dtype: str = "float32"):
    return build_trainer(model, TrainerConfig(pack_tokens=128, dtype=dtype, optim={"lr": 1e-3}), SINGLE_RANK)


def make_publisher(
    model: Path, directory: Path, dtype: torch.dtype = torch.float32, ranks: Ranks = SINGLE_RANK, **options
) -> WeightPublisher:
    return WeightPublisher(directory, ranks, policy="p", base_model=model, dtype=dtype, **options)


def test_published_weights_are_the_rounded_master_weights_and_match_the_model(model, tmp_path):
    trainer = make_trainer(model, "bfloat16")
    trainer.step(random_batches(1)[0])
    published = make_publisher(model, tmp_path, torch.bfloat16, incarnation=2).publish(trainer, 1)
    assert published.seconds > 0
    assert published.bytes == sum(value.nbytes for _, value in iter_merged_weights(trainer))
    assert verify_weights(published.path, reference_model=model).version == PolicyVersion("p", 2, 1)
    state = trainer.policy.model.state_dict()  # the rounded weights that the trainer computes with
    for name, value in load_file(published.path / "model.safetensors").items():
        assert torch.equal(value, state[name]), name


def test_the_text_part_of_a_vision_language_model_is_published_as_a_text_model(tmp_path):
    base = write_qwen3_5_with_images(tmp_path / "base")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (base / name).write_text("{}")
    (base / "tokenizer.json").write_text("{}")
    trainer = make_trainer(base)
    trainer.step(random_batches(1)[0])
    published = make_publisher(base, tmp_path).publish(trainer, 1).path
    assert not list(published.glob("*processor_config.json"))
    assert Tokenizer(published).digest == Tokenizer(base).digest
    config = json.loads((published / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    assert config["dtype"] == "float32" and not any("vision" in key or key == "text_config" for key in config)
    model, loading_info = AutoModelForCausalLM.from_pretrained(published, output_loading_info=True)
    assert not any(loading_info.values())
    loaded = load_engine_model(published, device="cpu")
    running = load_engine_model(base, dtype="float32", device="cpu")  # as the engine of the run starts
    apply_weights(running.module, stage_weights(published, running.module))
    for name, weight in get_untied_tensors(trainer.policy.model).items():
        assert all(torch.equal(each.state_dict()[name], weight) for each in (model, loaded.module, running.module))
    assert loaded.eos_ids == running.eos_ids == {QWEN3_5["eos_token_id"]}
    assert ModelSize.from_name(str(published)) == ModelSize.from_name(str(base))


def test_versions_are_removed_only_when_they_are_not_needed(model, tmp_path):
    trainer, replaced = make_trainer(model), make_publisher(model, tmp_path)
    publisher = make_publisher(model, tmp_path, incarnation=1)
    (tmp_path / ".0-000009.123").mkdir()
    for step in (1, 2, 10):
        replaced.publish(trainer, step)
    publisher.publish(trainer, 2)
    publisher.prune([PolicyVersion("p", 0, 2)])
    assert publisher.list_versions() == [PolicyVersion("p", 0, 2), PolicyVersion("p", 1, 2)]
    publisher.prune([])
    assert publisher.list_versions() == [PolicyVersion("p", 1, 2)]
    assert Manifest.read(publisher.path_for(1, 2)).version == PolicyVersion("p", 1, 2)
    make_publisher(model, tmp_path)  # removes what an interrupted publisher left
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
def test_the_published_config_has_the_dtype_of_the_weights_and_files_follow_the_umask(model, tmp_path, dtype_name):
    base = Path(shutil.copytree(model, tmp_path / "base"))
    settings = json.loads((base / "config.json").read_text())
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype_name]
    (base / "config.json").write_text(json.dumps({**settings, "dtype": other, "torch_dtype": other}))
    old_umask = os.umask(0o027)
    try:
        published = make_publisher(base, tmp_path / "weights", getattr(torch, dtype_name)).publish(
            make_trainer(model), 1
        )
    finally:
        os.umask(old_umask)
    published_config = json.loads((published.path / "config.json").read_text())
    assert published_config == {**settings, "dtype": dtype_name, "torch_dtype": dtype_name}
    assert {str(tensor.dtype) for tensor in load_file(published.path / "model.safetensors").values()} == {
        f"torch.{dtype_name}"
    }
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in published.path.iterdir()}
    assert modes == dict.fromkeys(modes, "0o640")


def test_with_shared_memory_a_version_is_announced_first_and_its_directory_follows(model, tmp_path):
    trainer = make_trainer(model)
    publisher = make_publisher(model, tmp_path, shares_memory=True)
    for step in (1, 2, 3):
        trainer.step(random_batches(1)[0])
        published = publisher.publish(trainer, step)
        announcement = Announcement.read(published.path)
        assert announcement is not None
        assert (announcement.version, announcement.directory) == (published.version, published.path.name)
        staged = WeightLoader(trainer.policy.model).stage(published.path)
        assert all(torch.equal(staged.tensors[name], value) for name, value in iter_merged_weights(trainer))
    publisher.write_last_directory()
    assert verify_weights(published.path, reference_model=model).version == PolicyVersion("p", 0, 3)
    saved = load_file(published.path / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in iter_merged_weights(trainer))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_is_withdrawn_before_its_weights_change_in_place(model, tmp_path, optimizer, dtype):
    config = TrainerConfig(pack_tokens=128, dtype=dtype, optim={"lr": 1e-2, "type": optimizer})
    trainer, warnings, waits = build_trainer(model, config, SINGLE_RANK), [], []

    def wait_until_copied(version: PolicyVersion) -> str:
        weights = {name: tensor.clone() for name, tensor in iter_merged_weights(trainer)}
        waits.append((version, weights))
        return "an engine was slow"

    publisher = make_publisher(
        model,
        tmp_path,
        getattr(torch, dtype),
        shares_memory=True,
        wait_until_copied=wait_until_copied,
        warn=warnings.append,
    )
    trainer.before_update = publisher.withdraw
    published = publisher.publish(trainer, 1)
    announced = {name: tensor.clone() for name, tensor in iter_merged_weights(trainer)}
    metrics = trainer.step(random_batches(1)[0])
    ((version, weights),) = waits
    assert (version, warnings) == (published.version, ["an engine was slow"])
    assert all(torch.equal(weights[name], announced[name]) for name in announced)
    assert metrics.to_dict()["train/copy_wait_seconds"] > 0
    announcement = Announcement.read(published.path)
    assert announcement is not None
    assert not announcement.is_current
    assert publisher._shared is not None
    for name, tensor in iter_merged_weights(trainer):
        assert tensor.data_ptr() == publisher._shared.tensors[name].data_ptr()
        assert not torch.equal(tensor, announced[name]) or "norm" in name


def test_a_failure_to_write_in_the_background_is_raised_later(model, tmp_path):
    trainer, directory = make_trainer(model), tmp_path / "weights"
    publisher = make_publisher(tmp_path / "missing", directory, shares_memory=True)
    directory.mkdir()
    (directory / "0-000002").symlink_to("nowhere")  # exists() is false, and the rename fails
    publisher.publish(trainer, 2)
    with pytest.raises(StorageFailed):
        publisher.write_last_directory()
    publisher.publish(trainer, 3)
    publisher.write_last_directory()
    assert publisher.list_versions() == [PolicyVersion("p", 0, 3)]


def test_the_last_version_is_written_even_if_an_older_one_could_not_be(model, tmp_path):
    publisher = make_publisher(model, tmp_path, shares_memory=True)
    publisher._next_write_time = math.inf  # the version is only announced
    publisher.publish(make_trainer(model), 2)
    publisher._directory_write = Future()
    publisher._directory_write.set_exception(StorageFailed("version 1 could not be written"))
    publisher.write_last_directory()
    assert publisher.list_versions() == [PolicyVersion("p", 0, 2)]


class FailingFirstRank(Ranks):
    """The second of two ranks, of which the first fails."""

    def all_gather(self, value):
        return [StorageFailed("no space"), value]


def test_all_ranks_fail_if_the_first_cannot_write_the_last_version(model, tmp_path):
    ranks = FailingFirstRank(torch.device("cpu"), rank=1, world_size=2)
    publisher = make_publisher(model, tmp_path, ranks=ranks, shares_memory=True)
    with pytest.raises(StorageFailed, match="no space"):
        publisher.write_last_directory()


def test_a_new_trainer_withdraws_what_an_earlier_one_announced(model, tmp_path):
    publisher = make_publisher(model, tmp_path, shares_memory=True)
    publisher.publish(make_trainer(model), 1)
    publisher.write_last_directory()
    make_publisher(model, tmp_path, incarnation=1)
    assert Announcement.read(publisher.path_for(0, 1)) is None


def test_versions_are_copied_to_an_object_store_and_removed_with_their_directories(model, tmp_path):
    trainer, bucket, warnings = make_trainer(model), tmp_path / "bucket", []
    publisher = make_publisher(model, tmp_path / "weights", url=f"file://{bucket}", warn=warnings.append)
    for step in (1, 2, 3, 4):
        publisher.publish(trainer, step)
    publisher.prune([PolicyVersion("p", 0, step) for step in (1, 2)])
    assert sorted(path.name for path in bucket.iterdir()) == ["0-000001", "0-000002", "0-000004"]
    assert verify_weights(bucket / "0-000004", reference_model=model).version.step == 4
    manifest = bucket / "0-000001" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()  # the store cannot remove it as a file
    publisher.prune([])
    assert len(warnings) == 1
    assert "ProviderError" in warnings[0]
    assert [version.step for version in publisher.list_versions()] == [1, 2, 4]  # kept, and removed later
    manifest.rmdir()
    publisher.prune([])
    assert [version.step for version in publisher.list_versions()] == [4]
    assert [path.name for path in bucket.iterdir()] == ["0-000004"]
