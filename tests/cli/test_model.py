"""`ramify model`: list and show."""

import json


def test_packaged_models_are_listed(ramify):
    result = ramify("model", "list")
    assert result.returncode == 0
    assert "tiny" in result.stdout
    listed = json.loads(ramify("model", "list", "--json").stdout)
    assert [model["name"] for model in listed] == ["tiny", "tiny-vision"]
    assert all(model["bytes"] <= 6_000_000 for model in listed)


def test_show_prints_dimensions_and_measurements(ramify):
    result = ramify("model", "show", "tiny")
    assert result.returncode == 0
    words = "parameters|context|well-formed replies|similarity|exact|parseable tool calls|seed 0"
    assert all(word in result.stdout for word in words.split("|"))


def test_missing_model_and_unreadable_files_are_named(ramify, tmp_path):
    result = ramify("model", "show", "no-such-model")
    assert result.returncode == 1
    assert "no-such-model" in result.stderr
    (tmp_path / "config.json").write_text("{")
    result = ramify("model", "show", str(tmp_path))
    assert result.returncode == 1
    assert f"ModelNotFound: {tmp_path / 'config.json'} is not JSON" in result.stderr
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    result = ramify("model", "show", str(tmp_path))
    assert result.returncode == 1
    assert f"WeightsRefused: {tmp_path / 'model.safetensors'} is not a safetensors file" in result.stderr
