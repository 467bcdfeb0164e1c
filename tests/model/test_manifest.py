"""Checking a published directory without loading it, as is done for an engine that loads by itself."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from ramify.errors import WeightsRefused
from ramify.model.manifest import Manifest, compute_checksum, read_tensor_shapes, verify_weights
from ramify.model.version import PolicyVersion

VERSION = PolicyVersion("policy", 1, 7)
TENSORS = {"embed": np.zeros((4, 2), np.float32), "head": np.ones((2, 4), np.float32)}


def write(directory, tensors, version=VERSION, *, tied=False):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    Manifest(version, {"model.safetensors": compute_checksum(directory / "model.safetensors")}).write(directory)
    return directory


def test_a_whole_directory_is_verified_and_named(tmp_path):
    like = write(tmp_path / "like", TENSORS)
    assert verify_weights(write(tmp_path / "new", TENSORS), like).version == VERSION
    assert read_tensor_shapes(like) == {"embed": [4, 2], "head": [2, 4]}


def test_a_changed_byte_is_noticed(tmp_path):
    directory = write(tmp_path / "new", TENSORS)
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (directory / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsRefused, match="checksum"):
        verify_weights(directory)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"embed": TENSORS["embed"]}, r"1 tensors missing \(head\)"),
        ({**TENSORS, "bias": np.zeros(3, np.float32)}, r"1 unknown tensors \(bias\)"),
        ({**TENSORS, "head": np.ones((2, 5), np.float32)}, r"head has shape \[2, 5\], the model \[2, 4\]"),
    ],
)
def test_another_model_is_noticed(tmp_path, tensors, said):
    like = write(tmp_path / "like", TENSORS)
    with pytest.raises(WeightsRefused, match=said):
        verify_weights(write(tmp_path / "new", tensors), like)


def test_a_tied_copy_may_be_there_or_not(tmp_path):
    like = write(tmp_path / "like", {**TENSORS, "lm_head.weight": np.zeros((4, 2), np.float32)}, tied=True)
    verify_weights(write(tmp_path / "new", TENSORS, tied=True), like)


def test_a_missing_or_foreign_file_is_named(tmp_path):
    directory = write(tmp_path / "new", TENSORS)
    (directory / "model.safetensors").unlink()
    with pytest.raises(WeightsRefused, match="cannot be read"):
        verify_weights(directory)
    (directory / "model.safetensors").write_bytes(b"short")
    with pytest.raises(WeightsRefused, match="not a safetensors file"):
        read_tensor_shapes(directory)


@pytest.mark.parametrize("version", [PolicyVersion("policy", 2, 30), PolicyVersion("a@b.c", 0, 0)])
def test_a_version_reads_back_from_its_text(version):
    assert PolicyVersion.parse(str(version)) == version


@pytest.mark.parametrize("text", ["default", "undefined", "@1.2", "policy@1", "policy@x.2", ""])
def test_other_texts_are_no_versions(text):
    assert PolicyVersion.parse(text) is None


def test_reading_a_manifest_needs_no_torch():
    script = "import sys; from ramify.model import Manifest; from ramify.model.manifest import verify"
    subprocess.run([sys.executable, "-c", f"{script}; assert 'torch' not in sys.modules"], check=True, timeout=60)
