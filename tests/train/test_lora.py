"""LoRA trains only adapters, and published weights have them merged."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from ramify.core.errors import ConfigInvalid
from ramify.infer.weight_loader import WeightLoader
from ramify.model.load import load_engine_model
from ramify.model.logprob_check import build_check_ids, compute_reference_logprobs
from ramify.model.lora import LoraLinear, add_adapters, add_engine_adapters
from ramify.model.weights import apply_weights, stage_weights
from ramify.model.weights_manifest import PublishedAdapters
from ramify.trace import PolicyVersion
from ramify.trace.forest import START_LOGPROB
from ramify.train.batch import Batch
from ramify.train.build import build_trainer
from ramify.train.checkpoint import CheckpointManager
from ramify.train.config import TrainerConfig, TrainerProcessConfig
from ramify.train.model_export import MasterReader
from ramify.train.publisher import WeightPublisher, iter_merged_weights
from ramify.train.sft.config import SftConfig
from tests.support.training import CONFIGS, SINGLE_RANK, VOCAB, build_model, random_batches


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.full("a second family"))])
def model(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "model"
    build_model(CONFIGS[request.param], "eager").save_pretrained(path)
    return path


def make_trainer(model: Path, dtype: str = "float32", quantize=None, **settings):
    lora = {"enabled": True, "rank": 4, **settings}
    config = TrainerConfig(pack_tokens=128, dtype=dtype, optim={"lr": 1e-2}, lora=lora)  # type: ignore[arg-type]
    return build_trainer(model, config, SINGLE_RANK, quantize=quantize)


def train(model: Path, steps: int, **settings):
    trainer = make_trainer(model, **settings)
    for batch in random_batches(steps):
        trainer.step(batch)
    return trainer


def test_only_adapters_are_trained_saved_and_loaded(model, tmp_path):
    trainer = make_trainer(model)
    before = {name: value.clone() for name, value in trainer.policy.named_parameters()}
    names = [name for name, _ in trainer.master_weights.named_parameters()]
    assert names
    assert all(".lora_" in name for name in names)
    for batch in random_batches(3):
        trainer.step(batch)
    for name, value in trainer.policy.named_parameters():
        assert torch.equal(value, before[name]) == (".lora_" not in name), name
    checkpoints = CheckpointManager(tmp_path, SINGLE_RANK)
    saved = MasterReader(checkpoints.save(trainer, 3)).names
    assert saved == {name.removeprefix("model.") for name in names}
    restored = make_trainer(model)
    checkpoints.load(restored, 3)
    batch = random_batches(4)[3]
    assert (restored.step(batch).loss, restored.step(batch).grad_norm) == (
        trainer.step(batch).loss,
        trainer.step(batch).grad_norm,
    )


def test_published_weights_are_the_base_plus_the_adapters(model, tmp_path):
    trainer = train(model, 3, alpha=8)
    publisher = WeightPublisher(tmp_path, SINGLE_RANK, policy="p", base_model=model, dtype=torch.float32)
    published = publisher.publish(trainer, 3)
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
    published_model = AutoModelForCausalLM.from_pretrained(published.path, attn_implementation="eager")
    ids = torch.arange(20) % VOCAB
    with torch.no_grad():
        logits = published_model(ids[None]).logits
    engine = load_engine_model(model, dtype="float32", device="cpu").module  # as an engine loads a version
    apply_weights(engine, stage_weights(published.path, engine))
    for name, value in published_model.state_dict().items():
        assert torch.equal(engine.state_dict()[name], value)
    assert logits.isfinite().all()


@pytest.mark.parametrize("shares_memory", [False, True], ids=["directory", "memory"])
def test_an_engine_computes_with_published_adapters_as_the_trainer_does(model, tmp_path, shares_memory):
    trainer = train(model, 3, alpha=8, quantize="8bit")
    adapters = PublishedAdapters(model, 2.0, "8bit")
    settings = {"base_model": model, "dtype": torch.float32, "adapters": adapters, "shares_memory": shares_memory}
    published = WeightPublisher(tmp_path, SINGLE_RANK, policy="p", **settings).publish(trainer, 3)
    assert published.bytes == sum(value.nbytes for value in trainer.master_weights.parameters())
    add = partial(add_engine_adapters, rank=4, alpha=8, target_modules=[], quantize="8bit")
    engine = load_engine_model(model, dtype="float32", device="cpu", add_adapters=add).module
    apply_weights(engine, WeightLoader(engine).stage(published.path))
    ids = build_check_ids(engine.config)
    with torch.no_grad():
        expected = compute_reference_logprobs(trainer.policy.model, ids, "eager")
        actual = compute_reference_logprobs(engine, ids, "eager")
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_outputs_and_gradients_equal_those_of_peft():
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    ours, theirs = (build_model(CONFIGS["llama"], "eager") for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    add_adapters(ours, 4, 8, [], seed=3)
    inject_adapter_in_model(PeftConfig(r=4, lora_alpha=8, target_modules=LINEAR_MAPS), theirs)
    generator = torch.Generator().manual_seed(0)
    for (name, value), (peft_name, peft_value) in zip(trained(ours), trained(theirs), strict=True):
        assert name == peft_name
        value.data.normal_(0, 0.1, generator=generator)
        peft_value.data.copy_(value.data)
    ids = torch.randint(VOCAB, (2, 20), generator=generator)
    results = [model(ids).logits for model in (ours, theirs)]
    assert torch.allclose(*results, rtol=1e-4, atol=1e-5)
    for logits in results:
        (logits.log_softmax(-1)[..., 7].sum()).backward()
    for (name, value), (_, peft_value) in zip(trained(ours), trained(theirs), strict=True):
        assert (value.grad - peft_value.grad).norm() <= 1e-4 * peft_value.grad.norm(), name
    assert all(value.grad is None for value in ours.parameters() if not value.requires_grad)


LINEAR_MAPS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trained(model):
    return [(name, value) for name, value in model.named_parameters() if value.requires_grad]


def test_the_input_of_a_first_layer_gets_no_gradient():
    linear = LoraLinear(torch.nn.Linear(8, 6), 2, 4, torch.Generator().manual_seed(0))
    for needs_gradient in (False, True):
        rows = torch.randn(5, 8, requires_grad=needs_gradient)
        with OperatorCalls() as calls:
            linear(rows).sum().backward()
        assert calls.count("lora_linear.default") == 1
        assert calls.count("lora_input_gradient.default") == needs_gradient
        assert (rows.grad is not None) == needs_gradient
    assert linear.weight.grad is None and linear.lora_B["default"].weight.grad is not None


def test_a_linear_map_with_an_adapter_compiles_to_one_graph():
    linear = LoraLinear(torch.nn.Linear(8, 6), 2, 4, torch.Generator().manual_seed(0))
    rows, gradients = torch.randn(1, 5, 8), []
    for forward in (linear, torch.compile(linear, backend="aot_eager", fullgraph=True)):
        linear.zero_grad()
        forward(rows).square().sum().backward()
        gradients.append([value.grad for value in linear.parameters() if value.requires_grad])
    assert all(torch.allclose(*pair) for pair in zip(*gradients, strict=True))


class OperatorCalls(TorchDispatchMode, list):
    """The names of the operators that ran in a block."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["8bit", "4bit"])
def test_a_quantized_base_trains_as_the_same_weights_in_all_bits(model, tmp_path, mode):
    quantized, restored = make_trainer(model, quantize=mode), make_trainer(model)
    names = [name for name, _ in restored.policy.named_parameters() if name.endswith("_proj.weight")]
    assert len(names) == 7 * CONFIGS["llama"].num_hidden_layers
    assert not any(name in names for name, _ in quantized.policy.named_parameters())
    for name in names:
        module = name.removesuffix(".weight")
        with torch.no_grad():
            restored.policy.get_parameter(name).copy_(quantized.policy.get_submodule(module).get_matrix())
    for batch in random_batches(2):
        steps = [trainer.step(batch) for trainer in (quantized, restored)]
        assert (steps[0].loss, steps[0].grad_norm) == (steps[1].loss, steps[1].grad_norm)
    assert quantized.flops_model == restored.flops_model
    published = [dict(iter_merged_weights(trainer)) for trainer in (quantized, restored)]
    assert published[0].keys() == published[1].keys() == load_file(model / "model.safetensors").keys()
    assert all(torch.equal(value, published[1][name]) for name, value in published[0].items())


def test_a_quantized_base_requires_adapters():
    for config in (TrainerProcessConfig, SftConfig):
        keys = {"data": {"path": "x"}} if config is SftConfig else {}
        with pytest.raises(ValueError, match=r"model.quantize: weights in 4 bits cannot be trained.*lora"):
            config.model_validate({"model": {"quantize": "4bit"}, **keys})
        config.model_validate({"model": {"quantize": "4bit"}, "trainer": {"lora": {"rank": 2}}, **keys})


def test_an_unknown_target_is_refused(model):
    with pytest.raises(ConfigInvalid, match=r"lora.target_modules: the layers have no 'query'.*q_proj"):
        make_trainer(model, target_modules=["query"])
    trainer = make_trainer(model, target_modules=["q_proj"])
    assert all("q_proj" in name for name, _ in trainer.master_weights.named_parameters())


def test_reference_that_is_the_starting_model_is_computed_without_adapters(model):
    """The loss and the gradient are those with the starting model's own logprobs."""
    trainer, start = train(model, 2), make_trainer(model)
    (batch,) = random_batches(1)
    with_start, with_scores = [], []
    for pack in batch.packs:
        logprob, _ = start.policy.compute_logprobs(start.prepare_inputs(pack))
        scores = logprob.detach().numpy()
        with_scores.append(replace(pack, targets=replace(pack.targets, ref_logprob=scores)))
        missing = np.full_like(scores, START_LOGPROB)
        with_start.append(replace(pack, targets=replace(pack.targets, ref_logprob=missing)))
    computed, given = Batch.from_packs(0, with_start), Batch.from_packs(0, with_scores)
    assert computed.entry_counts["start_reference"] == sum(len(pack.targets) for pack in batch.packs)
    results = []
    for each in (computed, given):
        accumulator = trainer.forward_backward(each)
        sums = accumulator.to_sums(accumulator.flatten_device_values(trainer.device).tolist())
        gradients = {name: value.grad.clone() for name, value in trainer.master_weights.named_parameters()}
        results.append((gradients, sums.component_losses))
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5) and results[0][1]["kl"] > 0
    for name, gradient in results[1][0].items():
        assert torch.allclose(results[0][0][name], gradient, rtol=1e-4, atol=1e-7), name
    full = build_trainer(model, TrainerConfig(pack_tokens=128), SINGLE_RANK)
    with pytest.raises(ConfigInvalid, match=r"only with lora\.enabled"):
        full.step(computed)
