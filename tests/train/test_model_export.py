"""`ramify export --model`: the model of any step that still has weights or a checkpoint, as transformers loads it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ramify.cli import main
from ramify.model.load import load_engine_model
from ramify.train.sft.config import SftConfig
from ramify.train.sft.run import SftResult, run_sft
from tests.support.models import write_qwen3_5_with_images
from tests.support.trainer import write_model
from tools.tiny.tokenizer import VOCAB_SIZE


def run_two_steps(home: Path, write_base: Callable[[Path], Path] = write_model, **trainer) -> SftResult:
    """Train two steps, with a checkpoint of each."""
    rows = [{"prompt": word, "completion": word[::-1]} for word in ("hello", "moin", "salut", "ciao")]
    (home / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "name": "run",
        "output": home,
        "model": {"name": str(write_base(home / "base"))},
        "data": {"path": str(home / "data.jsonl")},
        "batch_size": 2,
        "seq_len": 64,
        "checkpoint": {"interval": 1},
        "trainer": {"device": "cpu", "threads": 1, "optim": {"lr": 1e-2}, **trainer},
    }
    return run_sft(SftConfig.model_validate(settings))


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory) -> SftResult:
    return run_two_steps(tmp_path_factory.mktemp("lora"), lora={"enabled": True, "rank": 4, "alpha": 8})


@pytest.fixture(scope="module", params=[False, True], ids=["full", "lora"])
def finished(request, tmp_path_factory) -> SftResult:
    if request.param:
        return request.getfixturevalue("lora_run")
    return run_two_steps(tmp_path_factory.mktemp("full"))


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_model_of_a_step_is_the_published_one(finished, tmp_path, capsys):
    assert main(["export", str(finished.path), "--model", str(tmp_path / "last")]) == 0
    output = capsys.readouterr()
    assert output.out == f"{tmp_path / 'last'}\n"
    assert output.err.startswith("model of step 2")
    assert ("adapters merged" in output.err) == ("rank = 4" in (finished.path / "config.toml").read_text())
    published = read_tensors(finished.weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in published.items())
    assert (tmp_path / "last" / "tokenizer.json").exists()

    moved = finished.weights.rename(tmp_path / "moved")  # from here on, the model is built from checkpoints
    try:
        capsys.readouterr()
        assert main(["export", str(finished.path), "--model", str(tmp_path / "built"), "--step", "2"]) == 0
        output = capsys.readouterr()
        assert len(output.err.splitlines()) == 1  # without the progress bar of transformers
        built = read_tensors(tmp_path / "built")
        assert built.keys() == published.keys()
        assert all((built[name] - value).abs().max() <= 1e-6 for name, value in published.items())
        first_step = ["--model", str(tmp_path / "first"), "--step", "1"]
        assert main(["export", str(finished.path), *first_step]) == 0
        first = read_tensors(tmp_path / "first")
        assert any(not torch.equal(first[name], value) for name, value in published.items())
    finally:
        shutil.move(moved, finished.weights)


@pytest.mark.full("trains one more model")
def test_a_vision_language_model_of_which_the_text_part_is_trained_is_exported_as_a_text_model(tmp_path, capsys):
    def write_base(directory: Path) -> Path:
        write_model(directory)  # for its tokenizer
        (directory / "generation_config.json").unlink()
        return write_qwen3_5_with_images(directory, vocab_size=VOCAB_SIZE, max_position_embeddings=1024)

    finished = run_two_steps(tmp_path, write_base)
    shutil.rmtree(finished.weights)  # so that the model is built from the checkpoint
    assert main(["export", str(finished.path), "--model", str(tmp_path / "exported")]) == 0
    _, loading_info = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(loading_info.values())
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("qwen3_5_text", "bfloat16")
    untrained = load_engine_model(tmp_path / "base", dtype="bfloat16", device="cpu").module.state_dict()
    trained = load_engine_model(tmp_path / "exported", dtype="bfloat16", device="cpu").module.state_dict()
    assert trained.keys() == untrained.keys()
    assert any(not torch.equal(trained[name], value) for name, value in untrained.items())


def test_a_run_that_was_rolled_back_publishes_the_weights_that_it_trained_again(tmp_path):
    weights = run_two_steps(tmp_path).weights
    before = read_tensors(weights)
    assert main(["rollback", str(tmp_path / "run"), "1"]) == 0
    assert main(["sft", "@", str(tmp_path / "run" / "config.toml"), "--trainer.optim.lr", "1e-3"]) == 0
    after = read_tensors(weights)
    assert any(not torch.equal(after[name], value) for name, value in before.items())


def test_best_step_is_that_of_a_metric(finished, tmp_path, capsys):
    losses = {metric["step"]: metric["value"] for metric in _read_metrics(finished, capsys, "train/loss")}
    assert main(["export", str(finished.path), "--model", str(tmp_path / "best"), "--step", "best:train/loss"]) == 0
    best = min((step for step in losses if step in (1, 2)), key=lambda step: losses[step])
    assert capsys.readouterr().err.startswith(f"model of step {best}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--step", "7"], "--step: expected one of the available steps or best:METRIC, got '7'; stored steps of"),
        (["--step", "best:train/los"], "the run has no metric 'train/los'"),
        (["-o", "x"], "-o is not used with --model"),
    ],
)
def test_steps_without_a_model_are_refused(finished, tmp_path, capsys, args, message):
    try:
        code = main(["export", str(finished.path), "--model", str(tmp_path / "none"), *args])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_an_exported_adapter_in_peft_gives_the_logits_of_the_published_model(lora_run, tmp_path, capsys):
    from peft import AutoPeftModelForCausalLM, PeftModel

    directory = tmp_path / "exported"
    assert main(["export", str(lora_run.path), "--adapter", "-o", str(directory)]) == 0
    assert f"step 2 in {directory}" in capsys.readouterr().out
    ids = torch.arange(30)[None] % 250
    with torch.no_grad():
        base_model = AutoModelForCausalLM.from_pretrained(lora_run.path.parent / "base")
        untrained = base_model(ids).logits
        published = AutoModelForCausalLM.from_pretrained(lora_run.weights)(ids).logits
        adapted = PeftModel.from_pretrained(base_model, directory)(ids).logits
        auto_loaded = AutoPeftModelForCausalLM.from_pretrained(directory)(ids).logits
    assert (untrained - published).abs().max() > 1e-2
    assert (adapted - published).abs().max() < 1e-4
    assert torch.equal(auto_loaded, adapted)

    assert main(["export", str(lora_run.path), "--adapter", "-o", str(directory)]) == 2
    assert "exists" in capsys.readouterr().err
    run = Path(shutil.copytree(lora_run.path, tmp_path / "damaged"))
    damaged = run / "checkpoints" / "step_000002" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert main(["export", str(run), "--adapter"]) == 1
    assert "CheckpointRefused" in capsys.readouterr().err


def test_an_adapter_of_an_older_step_is_exported(lora_run, tmp_path, capsys):
    command = ["export", str(lora_run.path), "--adapter", "-o"]
    assert main([*command, str(tmp_path / "first"), "--step", "1"]) == 0
    assert f"adapter of step 1 in {tmp_path / 'first'}" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "last")]) == 0
    first, last = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "last"))
    assert any(not torch.equal(first[name], value) for name, value in last.items())
    assert main([*command, str(tmp_path / "none"), "--step", "7"]) == 2
    assert "--step: expected one of the available steps or best:METRIC, got '7'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["--adapter", "--model"])
def test_an_older_step_is_not_exported_instead_of_the_last(lora_run, tmp_path, capsys, kind):
    run = Path(shutil.copytree(lora_run.path, tmp_path / "lost"))
    (run / "checkpoints" / "step_000002" / "checkpoint.json").unlink()
    shutil.rmtree(run / "weights" / lora_run.weights.name)
    assert main(["export", str(run), kind]) == 1
    assert (
        "CheckpointRefused: the checkpoint of step 2, the last one, is missing or has no manifest"
        in capsys.readouterr().err
    )


def test_exporting_an_adapter_warns_if_the_base_was_quantized(lora_run, tmp_path, capsys):
    run = Path(shutil.copytree(lora_run.path, tmp_path / "quantized"))
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(re.sub("^quantize = .*", 'quantize = "4bit"', config, flags=re.MULTILINE))
    assert main(["export", str(run), "--adapter"]) == 0
    assert "trained on the base model quantized to 4 bits" in capsys.readouterr().err


def _read_metrics(finished: SftResult, capsys, name: str) -> list[dict[str, float]]:
    assert main(["metrics", str(finished.path), "--name", name, "--json"]) == 0
    return json.loads(capsys.readouterr().out)
