"""Published directories are verified without loading them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from ramify.core.errors import WeightsRefused
from ramify.model.weights_manifest import Manifest, compute_checksum, read_tensor_shapes, verify_weights
from ramify.trace.version import PolicyVersion

VERSION = PolicyVersion("policy", 1, 7)
TENSORS = {"embed": np.zeros((4, 2), np.float32), "head": np.ones((2, 4), np.float32)}


def write_version(directory, tensors, version=VERSION, *, tied=False):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    Manifest(version, {"model.safetensors": compute_checksum(directory / "model.safetensors")}).write(directory)
    return directory


def test_complete_directory_is_verified(tmp_path):
    model = write_version(tmp_path / "model", TENSORS)
    assert verify_weights(write_version(tmp_path / "new", TENSORS), model).version == VERSION
    assert read_tensor_shapes(model) == {"embed": [4, 2], "head": [2, 4]}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"embed": TENSORS["embed"]}, r"1 tensors missing \(head\)"),
        ({**TENSORS, "bias": np.zeros(3, np.float32)}, r"1 unknown tensors \(bias\)"),
        ({**TENSORS, "head": np.ones((2, 5), np.float32)}, r"head has shape \[2, 5\], the model \[2, 4\]"),
    ],
)
def test_other_tensors_are_rejected(tmp_path, tensors, message):
    model = write_version(tmp_path / "model", TENSORS)
    with pytest.raises(WeightsRefused, match=message):
        verify_weights(write_version(tmp_path / "new", tensors), model)


@pytest.mark.parametrize(("model_type", "is_text_part"), [("qwen3_5", True), ("llama", False)])
def test_tensors_that_are_never_loaded_are_left_out(tmp_path, model_type, is_text_part):
    names = ("mtp.fc", "model.layers.0.mtp.fc", "model.visual.patch_embed")
    model = write_version(tmp_path / "model", dict.fromkeys(names, np.zeros(1, np.float32)))
    (model / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert set(read_tensor_shapes(model)) == {*names[1 : 2 if is_text_part else 3]}


def test_tied_copy_may_be_missing(tmp_path):
    model = write_version(tmp_path / "model", {**TENSORS, "lm_head.weight": np.zeros((4, 2), np.float32)}, tied=True)
    verify_weights(write_version(tmp_path / "new", TENSORS, tied=True), model)


def test_missing_or_invalid_file_is_rejected(tmp_path):
    directory = write_version(tmp_path / "new", TENSORS)
    (directory / "model.safetensors").unlink()
    with pytest.raises(WeightsRefused, match="cannot be read"):
        verify_weights(directory)
    (directory / "model.safetensors").write_bytes(b"short")
    with pytest.raises(WeightsRefused, match="not a safetensors file"):
        read_tensor_shapes(directory)


@pytest.mark.parametrize("version", [PolicyVersion("policy", 2, 30), PolicyVersion("a@b.c", 0, 0)])
def test_version_is_parsed_from_its_text(version):
    assert PolicyVersion.parse(str(version)) == version


@pytest.mark.parametrize("text", ["default", "undefined", "@1.2", "policy@1", "policy@x.2", ""])
def test_invalid_version_text_is_none(text):
    assert PolicyVersion.parse(text) is None
