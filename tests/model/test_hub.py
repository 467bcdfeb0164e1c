"""Hub models are downloaded into the cache; without a network one line says how to get the files."""

import json
import re
import shutil
import threading

import pytest
from transformers import AutoConfig

from ramify.cli import main
from ramify.core import hub
from ramify.core.errors import ModelNotFound, ModelUnsupported
from ramify.launch.run_checks import check_dry_run, check_run, list_model_notes, list_start_notes
from ramify.model.resolve import fetch_model, has_weights, resolve_model_path
from ramify.orchestrate.run_config import RunConfig
from ramify.train.policy_model import load_policy
from ramify.train.sft.config import SftConfig
from ramify.train.sft.run import run_sft
from tests.support.hub import serve_hub

NAME = "org/small"


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A hub with `tiny` under another name and other formats of it; and an empty cache."""
    files = {path.name: path.read_bytes() for path in resolve_model_path("tiny").iterdir()}
    others = {"pytorch_model.bin": b"old", "onnx/model.onnx": b"other", "original/consolidated.json": b"{}"}
    with serve_hub() as server:
        server.add("models", NAME, {**files, **others})
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


def test_missing_model_is_downloaded_once(remote, capsys):
    with pytest.raises(ModelNotFound, match=f"'ramify model fetch {NAME}' downloads it"):
        resolve_model_path(NAME)
    lines = []
    path = fetch_model(NAME, log=lines.append)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (path / name).read_bytes() == (resolve_model_path("tiny") / name).read_bytes()
    assert not {"pytorch_model.bin", "onnx/model.onnx", "original/consolidated.json"} & set(remote.sent)
    assert lines[0].startswith(f"downloading {NAME} from {remote.url}")
    assert lines[-1].startswith(f"downloaded {NAME}")
    assert path == resolve_model_path(NAME) == fetch_model(NAME, log=lines.append)
    assert len(lines) == 2
    assert main(["model", "fetch", NAME]) == 0
    assert capsys.readouterr().out == f"{path}\n"


def test_doctor_downloads_the_config_only(remote, capsys):
    assert main(["doctor", "--model", NAME]) == 0
    captured = capsys.readouterr()
    assert "fused" in captured.out
    assert f"downloading config.json of {NAME} from" in captured.err
    assert f"downloaded config.json of {NAME} in" in captured.err
    assert remote.sent == ["config.json"]
    assert has_weights(fetch_model(NAME))


def test_cached_config_is_a_model_that_is_not_downloaded(remote, tmp_path, capsys, check_plugins_in_process):
    main(["doctor", "--model", NAME])
    advice = f"'ramify model fetch {NAME}' downloads it"
    with pytest.raises(ModelNotFound, match=rf"only the config of model '{NAME}' is in the local cache.*{advice}"):
        resolve_model_path(NAME)
    capsys.readouterr()
    assert main(["model", "show", NAME]) == 1
    assert advice in capsys.readouterr().err
    source = {"name": "reverse", "taskset": {"id": "reverse-text"}}
    config = RunConfig(name="rl", output=tmp_path, model={"name": NAME}, train=[source], seq_len=4096)
    check_dry_run(config)
    assert any(f"model.name: the run downloads {NAME}" in note for note in list_model_notes(config))
    assert any("seq_len: 4096 is longer than the model allows, 2048" in note for note in list_start_notes(config))
    assert remote.sent == ["config.json"]


def test_a_dry_run_refuses_a_model_by_its_cached_config(remote, tmp_path, check_plugins_in_process):
    AutoConfig.for_model("bert").save_pretrained(tmp_path)
    remote.add("models", "org/refused", {"config.json": (tmp_path / "config.json").read_bytes()})
    main(["doctor", "--model", "org/refused"])
    source = {"name": "reverse", "taskset": {"id": "reverse-text"}}
    with pytest.raises(ModelUnsupported, match="bert is an encoder"):
        check_dry_run(RunConfig(name="rl", output=tmp_path, model={"name": "org/refused"}, train=[source]))


def test_a_model_with_a_cached_tokenizer_is_found_without_its_weights(remote, capsys):
    path = fetch_model(NAME, log=lambda line: None)
    (path / "model.safetensors").unlink()
    assert resolve_model_path(NAME) == path
    assert main(["model", "show", NAME]) == 0
    assert re.search("^parameters +unknown: the weights are not here", capsys.readouterr().out, re.M)
    assert main(["model", "show", NAME, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] is None


def test_weights_that_the_trainer_refuses_are_not_downloaded(remote, tmp_path):
    AutoConfig.for_model("deepseek_v3").save_pretrained(tmp_path)
    remote.add("models", "org/refused", {"config.json": (tmp_path / "config.json").read_bytes(), "a.safetensors": b""})
    sft_config = SftConfig(name="sft", output=tmp_path, model={"name": "org/refused"}, data={"path": "data.jsonl"})
    source = {"name": "reverse", "taskset": {"id": "reverse-text"}}
    rl_config = RunConfig(name="rl", output=tmp_path, model={"name": "org/refused"}, train=[source])
    for start in (lambda: load_policy("org/refused"), lambda: run_sft(sft_config), lambda: check_run(rl_config)):
        with pytest.raises(ModelUnsupported, match="deepseek_v3 has latent keys"):
            start()
    assert remote.sent == ["config.json"]


@pytest.mark.parametrize("model_type", ["bert", "falcon_h1"])
def test_weights_that_the_engine_refuses_are_not_downloaded_to_serve_them(remote, tmp_path, capsys, model_type):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    remote.add("models", "org/refused", {"config.json": (tmp_path / "config.json").read_bytes(), "a.safetensors": b""})
    evaluate = ["eval", "reverse-text", "-m", "org/refused", "-o", str(tmp_path / "outputs")]
    serve = ["serve", "-m", "org/refused"]
    for command in (evaluate, serve, [*evaluate, "--dry-run"], [*serve, "--dry-run"]):
        assert main(command) == 1
        assert f"ModelUnsupported: {model_type} " in capsys.readouterr().err
    assert remote.sent == ["config.json"] and not (tmp_path / "outputs").exists()


def test_interrupted_download_is_completed(remote):
    path = fetch_model(NAME, log=lambda line: None)
    (path / "model.safetensors").resolve().unlink()
    (path / "model.safetensors").unlink()
    remote.sent.clear()
    assert fetch_model(NAME, log=lambda line: None) == path
    assert remote.sent == ["model.safetensors"]
    assert (path / "model.safetensors").is_file()


def test_progress_is_logged_without_a_terminal(remote, monkeypatch):
    progress_logged = threading.Event()
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        if "so far" in line:
            progress_logged.set()

    def wait_for_progress(data: bytes) -> None:
        if len(data) > 1_000_000:
            assert progress_logged.wait(30)

    monkeypatch.setattr(hub, "PROGRESS_INTERVAL", 0.05)
    remote.before_body = wait_for_progress
    fetch_model(NAME, log=log)
    assert any(line.startswith(f"downloading {NAME}: ") and line.endswith("MB so far") for line in lines)


def unreachable(remote, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def offline(remote, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("disconnect", [unreachable, offline])
def test_without_a_network_the_error_says_how_to_get_the_files(remote, monkeypatch, disconnect):
    disconnect(remote, monkeypatch)
    with pytest.raises(ModelNotFound) as error:
        fetch_model(NAME, log=lambda line: None)
    assert "\n" not in error.value.message
    assert "hf download org/small --local-dir small" in error.value.message
    assert ("HF_HUB_OFFLINE is set" in error.value.message) == (disconnect is offline)
    assert remote.sent == []


def test_unknown_and_gated_models_are_reported(remote):
    with pytest.raises(ModelNotFound, match=f"'org/smal' is neither a path here nor on {remote.url}: check the name"):
        fetch_model("org/smal", log=lambda line: None)
    remote.gated = True
    with pytest.raises(ModelNotFound, match=f"accept its terms at {remote.url}/{NAME}"):
        fetch_model(NAME, log=lambda line: None)


def test_other_names_do_not_use_the_hub(remote, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(resolve_model_path("tiny"), tmp_path / "a" / "b")
    assert fetch_model("a/b", log=pytest.fail) == tmp_path / "a" / "b"
    for name in ("tinny", "./models/small", "/models/small", "a/b/c"):
        with pytest.raises(ModelNotFound):
            fetch_model(name, log=pytest.fail)


EVAL = ("eval", "reverse-text", "-m", NAME, "--num_tasks", "1", "--sampling.max_tokens", "4", "-o")


@pytest.mark.process
def test_dry_runs_do_not_download(remote, tmp_path, capsys):
    assert main([*EVAL, str(tmp_path), "--dry-run"]) == 0
    note = f"the run downloads {NAME} when it starts; to do it now: 'ramify model fetch {NAME}'"
    assert note in capsys.readouterr().out
    assert remote.sent == []


@pytest.mark.process
def test_a_dry_run_of_an_eval_treats_names_as_the_eval_does(remote, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snapshot = tmp_path / "cache" / "models--gpt2" / "snapshots" / "main"  # only the config is cached
    AutoConfig.for_model("gpt2").save_pretrained(snapshot)
    for flags in ([], ["--dry-run"]):
        assert main(["eval", "reverse-text", "-m", "gpt2", *flags]) == 2
        assert "model.name: only the config of model 'gpt2' is in the local cache" in capsys.readouterr().err
    (tmp_path / "outputs").mkdir()
    assert main(["eval", "reverse-text", "-m", "outputs/typo", "--dry-run"]) == 0
    assert "note: model.name: not checked: model 'outputs/typo' was not found" in capsys.readouterr().out
    assert remote.sent == []


@pytest.mark.process
@pytest.mark.full("starts an engine")
def test_commands_download(remote, tmp_path, capsys):
    assert main([*EVAL, str(tmp_path)]) == 0
    assert f"downloading {NAME}" in capsys.readouterr().err
    assert "model.safetensors" in remote.sent
