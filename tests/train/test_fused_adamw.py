"""The fused AdamW on a GPU computes what torch's AdamW does."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from ramify.train import Batch, Trainer, TrainerConfig, pack_forests
from ramify.train.config import OptimConfig
from ramify.train.master_weights import MasterWeights, round_to_bfloat16
from ramify.train.optim import OptimizersContainer
from tests.support.training import CONFIGS, build_policy
from tests.train.test_trainer import build_forests, copy_weights

DEVICE = torch.device("cuda")
CONFIG = OptimConfig(lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1, max_grad_norm=1.0)
SHAPES = {"aligned": (64, 64), "odd": (37, 129), "late": (5, 7), "unused": (3, 3), "bias": (2051,), "one": (1,)}
TOLERANCE = 2e-5  # torch rounds 0.999 to float32 before it computes 1 - 0.999, the kernel after
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on a GPU")


class OptimizerPair:
    """The same weights twice: bfloat16 under master weights with the fused optimizer, and float32 with torch's."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.ParameterDict({name: torch.randn(shape, device=DEVICE) for name, shape in SHAPES.items()})
        reference = MasterWeights(deepcopy(self.module))
        self.reference = dict(reference.named_parameters())
        self.masters = MasterWeights(self.module, torch.bfloat16)
        self.fused_optimizers = OptimizersContainer(self.masters, CONFIG, None)
        self.torch_optimizers = OptimizersContainer(reference, CONFIG, None)
        assert self.fused_optimizers.fused
        assert not self.torch_optimizers.fused
        (self.fused,), (self.torch,) = self.fused_optimizers.optimizers, self.torch_optimizers.optimizers

    def step(self, step: int, packs: int = 1, added: float = 0.0) -> None:
        """Step both with random gradients; `added` is added to one element."""
        for pack in range(packs):
            for name, param in self.module.named_parameters():
                if name == "unused" or (name == "late" and pack < packs - 1):
                    continue
                unaligned = torch.randn(param.numel() + 1, device=DEVICE).bfloat16()[1:]
                param.grad = unaligned.view(param.shape)
                if name == "odd":
                    param.grad = param.grad.clone()
                    param.grad[3, 3] += added
                before, gradient = self.reference[name].grad, param.grad.float()
                self.reference[name].grad = gradient if before is None else before + gradient
            self.masters.accumulate_gradients()
        norm = self.masters.gradient_norm()
        expected_norm = nn.utils.clip_grad_norm_(self.reference.values(), CONFIG.max_grad_norm or 0.0)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0.0, equal_nan=True)
        self.fused_optimizers.step(step, norm)
        self.torch_optimizers.step(step, expected_norm)
        self.masters.zero_grad()
        for value in self.reference.values():
            value.grad = None

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return weights and moments by name, of the fused optimizer and of torch's."""
        fused = _named_tensors(self.fused, dict(self.masters.named_parameters()))
        return fused, _named_tensors(self.torch, self.reference)

    def check(self) -> None:
        actual, expected = self.tensors()
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert (actual[name] - value).norm() <= TOLERANCE * value.norm(), name
        for name, param in self.module.named_parameters():
            assert torch.equal(param, round_to_bfloat16(actual[name])), name


def _named_tensors(optimizer: torch.optim.Optimizer, weights: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    tensors = {name: weight.detach() for name, weight in weights.items()}
    for name, weight in weights.items():
        tensors |= {f"{name}/{field}": value for field, value in optimizer.state.get(weight, {}).items()}
    return tensors


@on_a_gpu
@pytest.mark.parametrize("packs", [1, 3])
def test_the_fused_step_clips_decays_and_updates_as_torch_does(packs):
    pair = OptimizerPair()
    before = pair.reference["unused"].detach().clone()
    for step in range(5):
        pair.step(step, packs)
        pair.check()
    tensors, _ = pair.tensors()
    assert torch.equal(tensors["unused"], before)
    assert "unused/step" not in tensors
    assert tensors["odd/step"] == tensors["late/step"] == 5


@on_a_gpu
@pytest.mark.parametrize("added", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_not_counted(added):
    pair = OptimizerPair()
    for step in range(2):
        pair.step(step)
    before = {name: value.clone() for name, value in pair.tensors()[0].items()}
    pair.step(2, added=added)
    assert all(torch.equal(value, before[name]) for name, value in pair.tensors()[0].items())
    pair.check()
    pair.step(3)
    pair.check()
    assert pair.tensors()[0]["odd/step"] == 3


@on_a_gpu
def test_the_optimizer_state_is_interchangeable_with_torch():
    first, second = OptimizerPair(), OptimizerPair()
    for step in range(2):
        first.step(step)
    torch_state = deepcopy(first.torch.state_dict())
    second.torch.load_state_dict(deepcopy(first.fused.state_dict()))
    second.fused.load_state_dict(torch_state)
    with torch.no_grad():
        for name, master in second.masters.named_parameters():
            master.copy_(first.reference[name])
            second.reference[name].copy_(dict(first.masters.named_parameters())[name])
    second.masters.copy_to_model()
    for step in range(2, 4):
        second.step(step)
        second.check()
    actual, expected = second.tensors()
    for name, value in actual.items():
        assert (value.dtype, value.device) == (expected[name].dtype, expected[name].device), name


@on_a_gpu
@pytest.mark.parametrize("pack_tokens", [40, 10_000])
def test_a_trainer_updates_alike_with_and_without_the_fused_optimizer(pack_tokens, monkeypatch):
    config = TrainerConfig(optim=CONFIG)
    fused, plain = (Trainer(build_policy(CONFIGS["qwen3"]).to(DEVICE), config, dtype=torch.bfloat16) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(MasterWeights, "supports_fused_adamw", False)
        plain.optimizer = OptimizersContainer(plain.master_weights, CONFIG, None)
    assert (fused.optimizer.fused, plain.optimizer.fused) == (True, False)
    before, batch = copy_weights(fused), Batch.from_packs(0, pack_forests(build_forests(), pack_tokens))
    for pack in batch.packs:
        fused.policy(fused.prepare_inputs(pack), batch.entry_counts).loss.backward()
        for fused_param, plain_param in zip(fused.policy.parameters(), plain.policy.parameters()):
            plain_param.grad = None if fused_param.grad is None else fused_param.grad.clone()
        fused.master_weights.accumulate_gradients()
        plain.master_weights.accumulate_gradients()
    norms = [float(trainer.optimizer_step(0)[0]) for trainer in (fused, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for name, value in copy_weights(fused).items():
        expected = copy_weights(plain)[name]
        assert (value - expected).norm() <= 1e-4 * (expected - before[name]).norm(), name
        assert torch.equal(dict(fused.policy.named_parameters())[name], round_to_bfloat16(value)), name
    assert not fused.master_weights.gradients()
    assert not fused.step(Batch.from_packs(1, batch.packs)).skipped
