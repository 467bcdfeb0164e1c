"""LoRA trains adapters alone; what is published is the plain model with them merged."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ramify.cli import main
from ramify.errors import ConfigInvalid
from ramify.model import PolicyVersion
from ramify.model.load import load_model
from ramify.model.weights import apply_weights, stage_weights
from ramify.train.batch import Batch, pack_forests
from ramify.train.build import build_trainer
from ramify.train.checkpoint import CheckpointManager
from ramify.train.config import TrainerConfig
from ramify.train.distributed import Ranks
from ramify.train.publisher import WeightPublisher
from ramify.train.sft import SftConfig, run_sft
from tests.train.batched import random_batches
from tests.train.models import CONFIGS, VOCAB, made
from tests.train.workers import write_model

ALONE = Ranks(torch.device("cpu"))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "model"
    made(CONFIGS[request.param], "eager").save_pretrained(path)
    return path


def trainer_of(model: Path, dtype: str = "float32", **lora):
    asked = {"enabled": True, "rank": 4, **lora}
    config = TrainerConfig(pack_tokens=128, dtype=dtype, optim={"lr": 1e-2}, lora=asked)  # type: ignore[arg-type]
    return build_trainer(model, config, ALONE)


def trained(model: Path, steps: int, **lora):
    trainer = trainer_of(model, **lora)
    for batch in random_batches(steps):
        trainer.step(batch)
    return trainer


def test_only_adapters_are_trained_saved_and_loaded(model, tmp_path):
    trainer = trainer_of(model)
    before = {name: value.clone() for name, value in trainer.policy.named_parameters()}
    names = [name for name, _ in trainer.master_weights.named_parameters()]
    assert names
    assert all(".lora_" in name for name in names)
    for batch in random_batches(3):
        trainer.step(batch)
    for name, value in trainer.policy.named_parameters():
        assert torch.equal(value, before[name]) == (".lora_" not in name), name
    checkpoints = CheckpointManager(tmp_path, ALONE)
    assert b"base_layer" not in (checkpoints.save(trainer, 3) / ".metadata").read_bytes()
    again = trainer_of(model)
    checkpoints.load(again, 3)
    batch = random_batches(4)[3]
    assert (again.step(batch).loss, again.step(batch).grad_norm) == (
        trainer.step(batch).loss,
        trainer.step(batch).grad_norm,
    )


def test_published_weights_are_the_base_plus_the_adapters(model, tmp_path):
    trainer = trained(model, 3, alpha=8)
    publisher = WeightPublisher(tmp_path, ALONE, policy="p", base_model=model, dtype=torch.float32)
    published = publisher.publish(trainer, 0, 3)
    assert published.version == PolicyVersion("p", 0, 3)
    base, merged = load_file(model / "model.safetensors"), load_file(published.path / "model.safetensors")
    assert base.keys() == merged.keys()
    changed = 0
    for name, before in base.items():
        stem = f"model.{name.removesuffix('.weight')}"
        masters = dict(trainer.master_weights.named_parameters())
        expected = before
        if f"{stem}.lora_A.default.weight" in masters:
            down, up = (masters[f"{stem}.lora_{side}.default.weight"].detach() for side in "AB")
            expected = before + 8 / 4 * (up @ down)
            changed += 1
        assert (merged[name] - expected).norm() <= 1e-5 * expected.norm(), name
    assert changed == 7 * CONFIGS["llama"].num_hidden_layers
    plain = AutoModelForCausalLM.from_pretrained(published.path, attn_implementation="eager")
    ids = torch.arange(20) % VOCAB
    with torch.no_grad():
        theirs = plain(ids[None]).logits
    engine = load_model(model, dtype="float32", device="cpu").module  # what an engine does with a version
    apply_weights(engine, stage_weights(published.path, engine))
    for name, value in plain.state_dict().items():
        assert torch.equal(engine.state_dict()[name], value)
    assert theirs.isfinite().all()


def test_an_exported_adapter_loads_in_peft_and_gives_the_logits_of_the_published_model(tmp_path, capsys):
    from peft import AutoPeftModelForCausalLM, PeftModel

    base = write_model(tmp_path / "base")
    rows = [{"prompt": word, "completion": word[::-1]} for word in ("hello", "moin", "salut", "ciao")]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "name": "adapted",
        "output": tmp_path,
        "model": {"name": str(base)},
        "data": {"path": str(tmp_path / "data.jsonl")},
        "batch_size": 2,
        "seq_len": 64,
        "trainer": {"threads": 1, "optim": {"lr": 1e-2}, "lora": {"enabled": True, "rank": 4, "alpha": 8}},
    }
    result = run_sft(SftConfig.model_validate(settings))
    folder = tmp_path / "exported"
    assert main(["export", str(result.path), "--adapter", "-o", str(folder)]) == 0
    assert f"step 2 in {folder}" in capsys.readouterr().out
    ids = torch.arange(30)[None] % 250
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base)
        untrained = plain(ids).logits
        published = AutoModelForCausalLM.from_pretrained(result.weights)(ids).logits
        adapted = PeftModel.from_pretrained(plain, folder)(ids).logits
        found_by_itself = AutoPeftModelForCausalLM.from_pretrained(folder)(ids).logits
    assert (untrained - published).abs().max() > 1e-2
    assert (adapted - published).abs().max() < 1e-4
    assert torch.equal(found_by_itself, adapted)

    assert main(["export", str(result.path), "--adapter", "-o", str(folder)]) == 2
    assert "exists" in capsys.readouterr().err
    flip = result.path / "checkpoints" / "step_000002" / "__0_0.distcp"
    flip.write_bytes(flip.read_bytes()[:-1] + b"?")
    assert main(["export", str(result.path), "--adapter"]) == 1
    assert "CheckpointRefused" in capsys.readouterr().err


def test_the_loss_falls(model):
    trainer = trainer_of(model)
    forests = random_batches(1)[0].packs
    batch = Batch.from_packs(0, pack_forests(forests, 128))
    losses = [trainer.step(batch).loss for _ in range(8)]
    assert losses[-1] < losses[0]


def test_a_map_that_is_not_there_is_named(model):
    with pytest.raises(ConfigInvalid, match=r"lora.targets: there is no 'query'.*q_proj"):
        trainer_of(model, targets=["query"])
    assert all("q_proj" in name for name, _ in trainer_of(model, targets=["q_proj"]).master_weights.named_parameters())
