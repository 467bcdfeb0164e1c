"""AdamW in one pass on a GPU does what torch's does in several."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from ramify.train import Batch, Trainer, TrainerConfig, pack_forests
from ramify.train.config import OptimConfig
from ramify.train.master_weights import MasterWeights
from ramify.train.optim import OptimizersContainer
from tests.train.models import CONFIGS, policy
from tests.train.test_trainer import forests, weights

DEVICE = torch.device("cuda")
CONFIG = OptimConfig(lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1, max_norm=1.0)
SHAPES = {"whole": (64, 64), "odd": (37, 129), "late": (5, 7), "unused": (3, 3), "bias": (2051,), "one": (1,)}
CLOSE = 2e-5  # torch rounds 0.999 to float32 before it takes it from 1, ours does so after
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on a GPU")


class Pair:
    """The same weights twice: as copies under masters that are updated in one pass, and by torch in float32."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.ParameterDict({name: torch.randn(shape, device=DEVICE) for name, shape in SHAPES.items()})
        plain = MasterWeights(deepcopy(self.module))
        self.plain = dict(plain.named_parameters())
        self.masters = MasterWeights(self.module, torch.bfloat16)
        self.ours, self.theirs = (OptimizersContainer(masters, CONFIG, None) for masters in (self.masters, plain))
        assert self.ours.fused
        assert not self.theirs.fused

    def step(self, number: int, packs: int = 1, spoilt: float = 0.0) -> None:
        for pack in range(packs):
            for name, copy in self.module.named_parameters():
                if name == "unused" or (name == "late" and pack < packs - 1):
                    continue
                copy.grad = torch.randn(copy.numel() + 1, device=DEVICE).bfloat16()[1:].view(copy.shape)  # nowhere even
                if name == "odd":
                    copy.grad = copy.grad.clone()
                    copy.grad[3, 3] += spoilt
                before, found = self.plain[name].grad, copy.grad.float()
                self.plain[name].grad = found if before is None else before + found
            self.masters.accumulate_gradients()
        norm = self.masters.gradient_norm()
        wanted = nn.utils.clip_grad_norm_(self.plain.values(), CONFIG.max_norm or 0.0)
        torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0.0, equal_nan=True)
        self.ours.step(number, norm)
        self.theirs.step(number, wanted)
        self.masters.zero_grad()
        for value in self.plain.values():
            value.grad = None

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Weights and moments by their names, ours and theirs."""
        found = []
        for (part,), named in (
            (self.ours.optimizers, self.masters.named_parameters()),
            (self.theirs.optimizers, self.plain.items()),
        ):
            found.append({})
            for name, value in named:
                found[-1][name] = value.detach()
                found[-1] |= {f"{name}/{field}": each for field, each in part.state.get(value, {}).items()}
        return found[0], found[1]

    def check(self) -> None:
        ours, theirs = self.tensors()
        assert ours.keys() == theirs.keys()
        for name, wanted in theirs.items():
            assert (ours[name] - wanted).norm() <= CLOSE * wanted.norm(), name
        for name, copy in self.module.named_parameters():
            assert torch.equal(copy, ours[name].bfloat16()), name


@on_a_gpu
@pytest.mark.parametrize("packs", [1, 3])
def test_one_pass_clips_decays_and_updates_as_torch_does(packs):
    pair = Pair()
    before = pair.plain["unused"].detach().clone()
    for number in range(5):
        pair.step(number, packs)
        pair.check()
    ours, _ = pair.tensors()
    assert torch.equal(ours["unused"], before)
    assert "unused/step" not in ours
    assert ours["odd/step"] == ours["late/step"] == 5


@on_a_gpu
@pytest.mark.parametrize("spoilt", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_changes_nothing_and_does_not_count(spoilt):
    pair = Pair()
    for number in range(2):
        pair.step(number)
    before = {name: value.clone() for name, value in pair.tensors()[0].items()}
    pair.step(2, spoilt=spoilt)
    assert all(torch.equal(value, before[name]) for name, value in pair.tensors()[0].items())
    pair.check()
    pair.step(3)
    pair.check()
    assert pair.tensors()[0]["odd/step"] == 3


@on_a_gpu
def test_the_state_is_that_of_torch():
    first, second = Pair(), Pair()
    for number in range(2):
        first.step(number)
    theirs = deepcopy(first.theirs.state_dict())
    second.theirs.load_state_dict(deepcopy(first.ours.state_dict()))
    second.ours.load_state_dict(theirs)
    with torch.no_grad():
        for name, master in second.masters.named_parameters():
            master.copy_(first.plain[name])
            second.plain[name].copy_(dict(first.masters.named_parameters())[name])
    second.masters.copy_to_model()
    for number in range(2, 4):
        second.step(number)
        second.check()
    ours, plain = second.tensors()
    assert all((each.dtype, each.device) == (plain[name].dtype, plain[name].device) for name, each in ours.items())


@on_a_gpu
@pytest.mark.parametrize("size", [40, 10_000])
def test_an_update_of_a_trainer_is_the_one_of_several_passes(size, monkeypatch):
    config = TrainerConfig(optim=CONFIG)
    one, several = (Trainer(policy(CONFIGS["qwen3"]).to(DEVICE), config, dtype=torch.bfloat16) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(MasterWeights, "fusable", False)
        several.optimizer = OptimizersContainer(several.master_weights, CONFIG, None)
    assert (one.optimizer.fused, several.optimizer.fused) == (True, False)
    before, batch = weights(one), Batch.from_packs(0, pack_forests(forests(), size))
    for pack in batch.packs:
        one.policy(one.prepare_inputs(pack), batch.entry_counts).loss.backward()
        for mine, other in zip(one.policy.parameters(), several.policy.parameters()):
            other.grad = None if mine.grad is None else mine.grad.clone()
        one.master_weights.accumulate_gradients()
        several.master_weights.accumulate_gradients()
    norms = [float(each.optimizer_step(0)[0]) for each in (one, several)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for name, value in weights(one).items():
        wanted = weights(several)[name]
        assert (value - wanted).norm() <= 1e-4 * (wanted - before[name]).norm(), name
        assert torch.equal(dict(one.policy.named_parameters())[name], value.bfloat16()), name
    assert not one.master_weights.gradients()
    assert not one.step(Batch.from_packs(1, batch.packs)).skipped
