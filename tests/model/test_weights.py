"""Weights are published atomically, verified before anything changes, and applied in place."""

import json
import random
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify.core.errors import ModelNotFound, WeightsRefused
from ramify.infer.config import EngineConfig
from ramify.infer.engine import Engine
from ramify.model import weights_manifest
from ramify.model.load import load_engine_model
from ramify.model.resolve import resolve_model_path
from ramify.model.weights import apply_weights, get_untied_tensors, publish_weights, stage_weights
from ramify.model.weights_manifest import MANIFEST_FILE, Manifest, compute_checksum
from ramify.trace.version import PolicyVersion
from tests.support.models import publish_as, reference, write_llama

pytestmark = pytest.mark.process

VERSION = PolicyVersion("policy", 2, 30)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sources")
    return write_llama(directory / "one", seed=1), write_llama(directory / "two", seed=2)


@pytest.fixture
def published(sources, tmp_path):
    return publish_as(tmp_path / "v", sources[1], VERSION)


def test_published_directory_is_a_model_with_a_version(sources, published):
    assert Manifest.read(published).version == VERSION
    assert resolve_model_path(str(published)) == published.resolve()
    actual, expected = get_untied_tensors(reference(published)), get_untied_tensors(reference(sources[1]))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_weights_are_applied_in_place(sources, published):
    model = load_engine_model(sources[0], dtype="float32", device="cpu").module
    addresses = {name: tensor.data_ptr() for name, tensor in get_untied_tensors(model).items()}
    staged = stage_weights(published, model)
    assert staged.version == VERSION
    apply_weights(model, staged)
    expected = get_untied_tensors(reference(sources[1]))
    for name, tensor in get_untied_tensors(model).items():
        assert torch.equal(tensor, expected[name])
        assert tensor.data_ptr() == addresses[name]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()  # still tied


def test_sharded_version_is_staged(sources, tmp_path, monkeypatch):
    monkeypatch.setattr("ramify.model.weights.SHARD_BYTES", 10_000)
    directory = publish_as(tmp_path / "sharded", sources[1], VERSION)
    assert len(Manifest.read(directory).files) > 2
    assert stage_weights(directory, reference(sources[0])).version == VERSION
    assert torch.equal(reference(directory).model.norm.weight, reference(sources[1]).model.norm.weight)


def test_full_disk_raises_and_leaves_nothing(small_disk):
    tensors = {f"t{index}": torch.zeros(1 << 18) for index in range(4)}
    with pytest.raises(OSError, match="No space left"):
        publish_weights(small_disk / "v", tensors, VERSION)
    assert not list(small_disk.iterdir())


def flip_last_byte(directory):
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit_tensors(directory, edit):
    """Edit the tensors and update the checksum."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")
    Manifest(VERSION, {"model.safetensors": compute_checksum(directory / "model.safetensors")}).write(directory)


NORM = "model.norm.weight"


@pytest.mark.promise
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_last_byte, "checksum"),
        (
            lambda directory: edit_tensors(directory, lambda tensors: tensors.pop(NORM)),
            "1 tensors missing .*model.norm.weight",
        ),
        (
            lambda directory: edit_tensors(directory, lambda tensors: tensors.update({NORM: torch.ones(7)})),
            r"shape \[7\]",
        ),
        (lambda directory: edit_tensors(directory, lambda tensors: tensors.update({"extra": torch.ones(1)})), "extra"),
        (lambda directory: (directory / "model.safetensors").unlink(), "cannot be read"),
        (lambda directory: (directory / MANIFEST_FILE).unlink(), "no readable manifest"),
        (lambda directory: (directory / MANIFEST_FILE).write_text(json.dumps({"policy": "x"})), "not a manifest"),
    ],
)
def test_bad_directory_is_rejected_and_weights_are_unchanged(sources, published, damage, message):
    model = reference(sources[0])
    before = {name: tensor.clone() for name, tensor in get_untied_tensors(model).items()}
    damage(published)
    with pytest.raises(WeightsRefused, match=message):
        stage_weights(published, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in get_untied_tensors(model).items())


def test_engine_rejects_a_version_with_changed_bytes(published):
    config = EngineConfig(kv_cache_tokens=64, max_running_requests=4)
    assert Engine.load(str(published), config).core.version == VERSION
    flip_last_byte(published)
    with pytest.raises(WeightsRefused, match="checksum"):
        Engine.load(str(published), config)


@pytest.mark.promise
def test_version_is_published_once_and_atomically(sources, published, tmp_path):
    with pytest.raises(WeightsRefused, match="exists already"):
        publish_as(published, sources[0], VERSION)

    class Broken(dict):
        def items(self):
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        publish_weights(tmp_path / "broken", Broken(), VERSION)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v"]


def test_resolving_reports_all_candidates(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelNotFound, match=r"does not exist.*hub.*does not exist"):
        resolve_model_path("org/model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        resolve_model_path(str(tmp_path / "empty"))


@pytest.mark.parametrize("path", ["run", "run/weights", "run/weights/0-000040"])
def test_a_path_near_published_weights_lists_them_newest_first(tmp_path, path):
    for name in ("2-000039", "10-000012", "2-000040", "1.0-000003", "notes"):
        (tmp_path / "run/weights" / name).mkdir(parents=True)
        (tmp_path / "run/weights" / name / "config.json").write_text("{}")
    (tmp_path / "run/weights/2-000041").mkdir()  # no model
    listed = f"{tmp_path}/run/weights holds 1.0-000003, 10-000012, 2-000040, 2-000039"
    with pytest.raises(ModelNotFound, match=f": {listed}$"):
        resolve_model_path(str(tmp_path / path))


def test_cached_hub_model_is_resolved_offline(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc").symlink_to(sources[0])
    assert resolve_model_path("org/model") == sources[0].resolve()


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 4999, 12_345])
def test_checksum_by_several_threads_is_that_of_the_whole_file(tmp_path, monkeypatch, size):
    monkeypatch.setattr(weights_manifest, "PART_BYTES", 1000)
    monkeypatch.setattr(weights_manifest, "READ_BYTES", 300)
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    assert compute_checksum(tmp_path / "file") == f"{zlib.crc32(data):08x}"
