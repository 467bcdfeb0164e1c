"""The fused AdamW computes what torch's AdamW does: on a GPU, or in Triton's interpreter (`tests/model`)."""

import os
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from ramify.train import Batch, Trainer, TrainerConfig, pack_forests
from ramify.train.config import OptimConfig
from ramify.train.master_weights import MasterWeights, round_to_bfloat16
from ramify.train.optim import OptimizersContainer
from ramify.train.quantized_moments import FIRST_LEVELS, dequantize_moments
from tests.support.training import CONFIGS, build_policy, copy_weights
from tests.train.test_trainer import build_forests

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1, "max_grad_norm": 1.0}
SHAPES = {"aligned": (64, 64), "odd": (37, 129), "late": (5, 7), "unused": (3, 3), "bias": (2051,), "one": (1,)}
TOLERANCE = 2e-5  # torch rounds 0.999 to float32 before it computes 1 - 0.999, the kernel after
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not IS_INTERPRETED, reason="the kernel runs on a GPU or in the interpreter"
)
long_in_the_interpreter = pytest.mark.skipif(
    IS_INTERPRETED and not os.environ.get("RAMIFY_FULL"),
    reason="seconds in the interpreter",
)


class OptimizerPair:
    """The same weights twice: split with the fused optimizer, and float32 with torch's."""

    def __init__(self, moments: str = "float32") -> None:
        torch.manual_seed(0)
        self.is_quantized = moments == "8bit"
        config = OptimConfig.model_validate({**SETTINGS, "moments": moments})
        self.module = nn.ParameterDict({name: torch.randn(shape, device=DEVICE) for name, shape in SHAPES.items()})
        self.reference = MasterWeights(deepcopy(self.module))
        self.masters = MasterWeights(self.module, torch.bfloat16)
        self.fused_optimizers = OptimizersContainer(self.masters, config, None)
        self.torch_optimizers = OptimizersContainer(self.reference, config, None)
        assert self.fused_optimizers.fused
        assert not self.torch_optimizers.fused

    def step(self, step: int, packs: int = 1, added: float = 0.0) -> None:
        """Step both with random gradients; `added` is added to one element."""
        references = dict(self.reference.named_parameters())
        self.masters.zero_grad(num_packs=packs)
        for pack in range(packs):
            for name, parameter in self.module.named_parameters():
                if name == "unused" or (name == "late" and pack < packs - 1):
                    continue
                unaligned = torch.randn(parameter.numel() + 1, device=DEVICE).bfloat16()[1:]
                gradient = unaligned.view(parameter.shape)
                if name == "odd":
                    gradient = gradient.clone()
                    gradient[3, 3] += added
                (parameter * gradient).sum().backward()
                (references[name] * gradient.float()).sum().backward()
        norm, expected_norm = self.masters.gradient_norm(), self.reference.clip_gradients(1.0)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0.0, equal_nan=True)
        self.fused_optimizers.step(step, norm)
        self.torch_optimizers.step(step, expected_norm)
        self.masters.zero_grad()
        self.reference.zero_grad()

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return weights and moments by name, of the fused optimizer and of torch's."""
        return (
            _named_tensors(self.masters, self.fused_optimizers),
            _named_tensors(self.reference, self.torch_optimizers),
        )

    def check(self) -> None:
        actual, expected = self.tensors()
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            if self.is_quantized and name.endswith(("exp_avg", "exp_avg_sq")):
                self._check_quantized(actual[name], value, name)
            else:
                tolerance = 10 * TOLERANCE if self.is_quantized else TOLERANCE  # another code is another update
                assert (actual[name] - value).norm() <= tolerance * value.norm(), name
        for name, parameter in self.module.named_parameters():
            assert torch.equal(parameter, round_to_bfloat16(actual[name])), name

    def _check_quantized(self, actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
        """A last bit decides between two codes of 8 bits, so one value in a hundred may be off by one code."""
        errors, largest = (actual - expected).abs(), expected.abs().max()
        is_other_code = errors > TOLERANCE * largest
        assert is_other_code.sum() <= 1 + errors.numel() // 100, name
        assert errors.max() <= 2.5 / FIRST_LEVELS * largest, name


def _named_tensors(masters: MasterWeights, container: OptimizersContainer) -> dict[str, torch.Tensor]:
    tensors = {name: masters.to_float32(item).to(DEVICE).clone() for name, item in masters.named_parameters()}
    states = {item: state for optimizer in container.optimizers for item, state in optimizer.state.items()}
    for name, parameter in masters.named_parameters():
        state = states.get(parameter, {})
        if "exp_avg_codes" in state:
            state = {"step": state["step"], **dequantize_moments(state)}
        tensors |= {f"{name}/{field}": value for field, value in state.items()}
    return tensors


@pytest.mark.parametrize(
    ("packs", "moments"),
    [
        (1, "float32"),
        (3, "8bit"),
        pytest.param(1, "8bit", marks=long_in_the_interpreter),
        pytest.param(3, "float32", marks=long_in_the_interpreter),
    ],
)
def test_the_fused_step_clips_decays_and_updates_as_torch_does(packs, moments):
    pair = OptimizerPair(moments)
    before = pair.tensors()[1]["unused"].clone()
    for step in range(5):
        pair.step(step, packs)
        pair.check()
    tensors, _ = pair.tensors()
    assert torch.equal(tensors["unused"], before)
    assert "unused/step" not in tensors
    assert tensors["odd/step"] == tensors["late/step"] == 5


def update_float32(value, gradient, moments, rate: float, decay: float, correction: float) -> np.ndarray:
    """Return what the kernel makes of a float32 weight, operation by operation; updates the moments in place."""
    beta1, beta2 = SETTINGS["betas"]
    first, second = moments
    first[:] = np.float32(beta1) * first + np.float32(1 - beta1) * gradient
    second[:] = np.float32(beta2) * second + np.float32(1 - beta2) * gradient * gradient
    value = value - np.float32(decay) * value
    return value - np.float32(rate) * first / (np.sqrt(second) * np.float32(correction) + np.float32(1.0))


@pytest.mark.promise
@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU fuses multiplications and additions")
@pytest.mark.parametrize("weight_decay", [0.0, 1.0])  # halving a tie gives a tie
def test_split_masters_equal_float32_masters_bit_for_bit(weight_decay):
    """With eps = 1, an update is in proportion to its gradient, so weights of every size change by a part of theirs."""
    special = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x00000000, 0x00000001, 0x00008000, 0x007FFFFF, 0x007F8000]
    special = np.array([*special, 0x00800000, 0x7F7F7FFF], np.uint32)  # ties, denormal numbers, the largest
    random = np.random.default_rng(0).integers(0, 2**32, 1500, np.uint32)
    random = np.concatenate([random & 0xFFFF0000 | 0x8000, random])
    random = random[random & 0x7F800000 < 0x7F000000]  # an update does not exceed the largest number
    values = np.concatenate([special, special | 0x80000000, random]).view(np.float32)
    module = nn.ParameterDict({"weight": torch.from_numpy(values.copy())})
    masters = MasterWeights(module, torch.bfloat16)
    config = OptimConfig.model_validate({**SETTINGS, "lr": 0.5, "eps": 1.0, "max_grad_norm": None})
    optimizers, (beta1, beta2) = OptimizersContainer(masters, config, None), config.betas
    (group,) = optimizers.optimizers[0].param_groups
    group["weight_decay"] = weight_decay
    moments, (weight,) = np.zeros((2, len(values)), np.float32), masters.parameters()
    rng, num_changed, num_ties, num_denormal = np.random.default_rng(1), 0, 0, 0
    for step in range(4):
        sizes = np.minimum(np.abs(values), np.float32(1e15)) * 2.0 ** rng.integers(-20, 0, len(values))
        gradient = (sizes * rng.choice([-1, 1], len(values))).astype(np.float32)
        gradient[: 2 * len(special)] = 0.0
        masters.zero_grad(num_packs=2)
        for part in (gradient, np.zeros_like(gradient)):
            (weight * torch.from_numpy(part)).sum().backward()
        gradient = masters.gradients()[weight].numpy().copy()  # rounded to bfloat16, as the backward pass does
        optimizers.step(step, torch.ones(()))
        rate, correction = 0.5 / (1 - beta1 ** (step + 1)), (1 - beta2 ** (step + 1)) ** -0.5
        before, values = values, update_float32(values, gradient, moments, rate, 0.5 * weight_decay, correction)
        joined, state = masters.to_float32(weight).numpy(), optimizers.optimizers[0].state[weight]
        assert np.array_equal(joined.view(np.int32), values.view(np.int32))
        assert torch.equal(weight.view(torch.int16), round_to_bfloat16(torch.from_numpy(values)).view(torch.int16))
        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            assert np.array_equal(state[name].numpy().view(np.int32), moment.view(np.int32)), name
        num_changed += int((values != before).sum())
        num_ties += int((values.view(np.int32) & 0xFFFF == 0x8000).sum())
        num_denormal += int(((values != 0) & (np.abs(values) < 2.0**-126)).sum())
    assert num_changed > 4000
    assert min(num_ties, num_denormal) > 20


@pytest.mark.parametrize(
    ("added", "moments"),
    [
        (torch.inf, "8bit"),
        (torch.nan, "float32"),
        pytest.param(torch.inf, "float32", marks=long_in_the_interpreter),
        pytest.param(torch.nan, "8bit", marks=long_in_the_interpreter),
    ],
)
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_not_counted(added, moments):
    pair = OptimizerPair(moments)
    for step in range(2):
        pair.step(step)
    before = {name: value.clone() for name, value in pair.tensors()[0].items()}
    pair.step(2, added=added)
    assert all(torch.equal(value, before[name]) for name, value in pair.tensors()[0].items())
    pair.check()
    pair.step(3)
    pair.check()
    assert pair.tensors()[0]["odd/step"] == 3


@pytest.mark.promise
def test_a_trial_update_takes_the_memory_and_changes_nothing():
    pair, launches = OptimizerPair("8bit"), []
    (optimizer,) = pair.fused_optimizers.optimizers
    optimizer.register_step_post_hook(lambda *_: launches.append(len(optimizer.state)))
    pair.step(0)
    before = {name: value.clone() for name, value in pair.tensors()[0].items()}
    with pair.fused_optimizers.fresh_state():
        pair.masters.allocate_gradients()
        pair.fused_optimizers.try_update(pair.masters.gradient_norm())
    pair.masters.zero_grad()
    assert launches == [len(SHAPES) - 1, len(SHAPES)]
    after = pair.tensors()[0]
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    pair.step(1)
    pair.check()


@pytest.mark.skipif(IS_INTERPRETED, reason="a model takes minutes in the interpreter")
@pytest.mark.parametrize("pack_tokens", [40, 10_000])
def test_a_trainer_updates_alike_with_and_without_the_fused_optimizer(pack_tokens, monkeypatch):
    config = TrainerConfig.model_validate({"optim": SETTINGS})
    fused, plain = (Trainer(build_policy(CONFIGS["qwen3"]).to(DEVICE), config, dtype=torch.bfloat16) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(MasterWeights, "supports_fused_adamw", False)
        plain.optimizer = OptimizersContainer(plain.master_weights, config.optim, None)
    assert (fused.optimizer.fused, plain.optimizer.fused) == (True, False)
    before, batch = copy_weights(fused), Batch.from_packs(0, pack_forests(build_forests(), pack_tokens))
    for trainer in (fused, plain):
        trainer.forward_backward(batch)
    gradients = [list(trainer.master_weights.gradients().values()) for trainer in (fused, plain)]
    for gradient, other in zip(*gradients, strict=True):
        other.copy_(gradient)  # a GPU adds in any order, and Adam's first step is the sign of even a tiny gradient
    norms = [float(trainer.optimizer_step(0)[0]) for trainer in (fused, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for name, value in copy_weights(fused).items():
        expected = copy_weights(plain)[name]
        assert (value - expected).norm() <= 1e-3 * (expected - before[name]).norm(), name
        assert torch.equal(dict(fused.policy.named_parameters())[name].cpu(), round_to_bfloat16(value)), name
    assert not fused.master_weights.gradients()
    assert not fused.step(Batch.from_packs(1, batch.packs)).skipped
