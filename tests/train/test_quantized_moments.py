"""AdamW's moments in 8 bits: their precision, what is never lost, and training with them."""

import pytest
import torch

from ramify.core.errors import CheckpointRefused
from ramify.train import Trainer, TrainerConfig
from ramify.train.checkpoint import CheckpointManager
from ramify.train.quantized_moments import allocate_moments, dequantize_moments, is_inside_layers, quantize_moments
from tests.support.training import CONFIGS, SINGLE_RANK, build_policy, copy_weights, random_batches


def make_trainer(moments: str) -> Trainer:
    config = TrainerConfig.model_validate({"pack_tokens": 128, "optim": {"lr": 1e-3, "moments": moments}})
    return Trainer(build_policy(CONFIGS["llama"]), config)


def test_moments_are_rounded_finely_near_zero_and_keep_their_signs():
    torch.manual_seed(0)
    first, second = torch.randn(10, 128), torch.randn(10, 128).square()  # a row is a block
    moments = dequantize_moments(quantize_moments(first, second))
    for values, restored in ((first, moments["exp_avg"]), (second.sqrt(), moments["exp_avg_sq"].sqrt())):
        largest = values.abs().amax(1, keepdim=True)
        half_step = (values.abs() * largest).sqrt() / 127 + largest / 127**2
        assert ((restored - values).abs() <= half_step).all()
    assert (moments["exp_avg"] * first >= 0).all()


def test_a_second_moment_that_is_not_zero_never_becomes_zero():
    second = torch.tensor([[0.0, 1e-30, 1e-12, 1.0]])
    moments = dequantize_moments(quantize_moments(torch.zeros_like(second), second))
    assert ((moments["exp_avg_sq"] > 0) == (second > 0)).all()
    assert moments["exp_avg_sq"][0, 3] == 1.0


def test_stored_moments_do_not_drift():
    torch.manual_seed(0)
    once = quantize_moments(torch.randn(50, 70) * 1e-6, torch.rand(50, 70) * 1e-9)
    again = once
    for _ in range(5):
        again = quantize_moments(*dequantize_moments(again).values())
    assert all(torch.equal(once[name], again[name]) for name in once)
    zeros = allocate_moments(torch.zeros(50, 70))
    assert {name: (value.shape, value.dtype) for name, value in zeros.items()} == {
        name: (value.shape, value.dtype) for name, value in once.items()
    }


def test_matrices_and_experts_inside_the_layers_have_8_bits():
    matrix, experts, norm = torch.zeros(2, 2), torch.zeros(2, 2, 2), torch.zeros(2)
    assert is_inside_layers("model.layers.0.mlp.up_proj.weight", matrix)
    assert is_inside_layers("model.layers.0.mlp.experts.gate_up_proj", experts)
    assert not is_inside_layers("model.layers.0.input_layernorm.weight", norm)
    assert not is_inside_layers("model.embed_tokens.weight", matrix)
    assert not is_inside_layers("lm_head.weight", matrix)


def test_training_with_8_bits_follows_float32():
    exact, rounded = make_trainer("float32"), make_trainer("8bit")
    before = copy_weights(exact)
    for batch in random_batches(4):
        exact.step(batch)
        rounded.step(batch)
    for name, value in copy_weights(rounded).items():
        update, expected = value - before[name], copy_weights(exact)[name] - before[name]
        assert torch.cosine_similarity(update.flatten(), expected.flatten(), dim=0) > 0.99, name
    states = [state for optimizer in rounded.optimizer.optimizers for state in optimizer.state.values()]
    assert {"exp_avg_codes", "exp_avg_sq_codes", "exp_avg"} <= {name for state in states for name in state}


def test_moments_are_saved_as_they_are_and_a_run_refuses_another_format(tmp_path):
    first, second = random_batches(2)
    trainer, checkpoints = make_trainer("8bit"), CheckpointManager(tmp_path, SINGLE_RANK)
    trainer.step(first)
    path = checkpoints.save(trainer, 1)
    restored = make_trainer("8bit")
    checkpoints.load(restored, 1)
    assert restored.step(second).grad_norm == trainer.step(second).grad_norm
    assert all(torch.equal(value, copy_weights(trainer)[name]) for name, value in copy_weights(restored).items())
    with pytest.raises(CheckpointRefused, match="written by adamw-8bit, this run has adamw"):
        checkpoints.load(make_trainer("float32"), 1)
    float32_path = CheckpointManager(tmp_path / "float32", SINGLE_RANK).save(make_trainer_after(first), 1)
    sizes = [sum(file.stat().st_size for file in item.iterdir()) for item in (path, float32_path)]
    assert sizes[0] < 0.75 * sizes[1]


def make_trainer_after(batch) -> Trainer:
    trainer = make_trainer("float32")
    trainer.step(batch)
    return trainer
