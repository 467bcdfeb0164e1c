"""`ramify model`: what it lists and shows, and what it refuses to overwrite."""

import json

from tests.cli.installed_command import ramify_command


def test_packaged_model_is_listed():
    done = ramify_command("model", "list")
    assert done.returncode == 0
    assert "tiny" in done.stdout
    (listed,) = json.loads(ramify_command("model", "list", "--json").stdout)
    assert listed["name"] == "tiny"
    assert listed["bytes"] <= 6_000_000


def test_show_prints_dimensions_and_measurements():
    done = ramify_command("model", "show", "tiny")
    assert done.returncode == 0
    for words in (
        "parameters",
        "context",
        "well-formed replies",
        "similarity",
        "exact",
        "parseable tool calls",
        "seed 0",
    ):
        assert words in done.stdout


def test_missing_model_is_named():
    done = ramify_command("model", "show", "no-such-model")
    assert done.returncode == 1
    assert "no-such-model" in done.stderr


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    done = ramify_command("model", "show", str(tmp_path))
    assert done.returncode == 1
    assert f"ModelNotFound: {tmp_path / 'config.json'} is not JSON" in done.stderr
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    done = ramify_command("model", "show", str(tmp_path))
    assert done.returncode == 1
    assert f"WeightsRefused: {tmp_path / 'model.safetensors'} is not a safetensors file" in done.stderr
