"""Master weights that are split into bfloat16 and a remainder have the bits of float32, and collect gradients."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ramify.train.config import OptimConfig
from ramify.train.master_weights import MasterWeights, join_float32, round_to_bfloat16, split_float32
from ramify.train.optim import OptimizersContainer

NAN_BITS = 0x7FC00000


def from_bits(*bits: int) -> torch.Tensor:
    """Return the float32 numbers with these bits."""
    return torch.tensor(bits, dtype=torch.uint32).view(torch.float32)


@pytest.mark.parametrize(
    ("bits", "high"),
    [
        (0x3F807FFF, 0x3F80),
        (0x3F808000, 0x3F81),  # torch rounds this tie to 0x3F80
        (0x3F818000, 0x3F82),
        (0xBF808000, 0xBF81),
        (0x80000000, 0x8000),
        (0x00000001, 0x0000),
        (0x80000001, 0x8000),
        (0x00008000, 0x0001),
        (0x807F8000, 0x8080),  # the largest denormal number becomes a normal one
        (0x7F7F8000, 0x7F80),  # beyond the largest number of bfloat16 is infinity
        (0xFF800000, 0xFF80),
        (0x7FFFFFFF, 0x7FC0),  # NaN, as CUDA writes it
        (0xFFFF8000, 0x7FC0),
    ],
)
def test_ties_are_rounded_away_from_zero_and_the_halves_make_the_number_again(bits, high):
    values, remainders = split_float32(from_bits(bits))
    assert values.view(torch.uint16).tolist() == [high]
    joined = join_float32(values, remainders).view(torch.uint32).tolist()
    assert joined == [NAN_BITS if high == 0x7FC0 else bits]


def test_all_other_numbers_are_rounded_as_torch_does():
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    values = bits.to(torch.int32).view(torch.float32)
    values = values[~values.isnan()]
    assert torch.equal(join_float32(*split_float32(values)).view(torch.int32), values.view(torch.int32))
    untied = values[values.view(torch.int32) & 0xFFFF != 0x8000]
    assert torch.equal(round_to_bfloat16(untied), untied.bfloat16())


def test_gradients_are_collected_as_they_arrive_and_those_of_several_packs_are_summed_in_float32():
    module = nn.ParameterDict({name: torch.zeros(1000) for name in ("both", "later", "never")})
    masters = MasterWeights(module, torch.bfloat16)
    torch.manual_seed(0)
    gradients = [torch.randn(1000).bfloat16() for _ in range(3)]
    (module["both"] * gradients[0]).sum().backward()
    assert module["both"].grad is None
    assert list(masters.gradients()) == [module["both"]]
    assert torch.equal(masters.gradients()[module["both"]], gradients[0])
    masters.zero_grad(num_packs=2)
    (module["both"] * gradients[0]).sum().backward()
    (module["both"] * gradients[1] + module["later"] * gradients[2]).sum().backward()
    total = gradients[0].float() + gradients[1]
    assert torch.equal(masters.gradients()[module["both"]], total)
    assert {gradient.dtype for gradient in masters.gradients().values()} == {torch.float32}
    expected_norm = torch.cat([total, gradients[2].float()]).norm()
    assert float(masters.gradient_norm()) == pytest.approx(float(expected_norm), rel=1e-6)
    assert float(masters.clip_gradients(1.0)) == pytest.approx(float(expected_norm), rel=1e-6)
    assert float(masters.gradient_norm()) == pytest.approx(1.0, rel=1e-5)
    masters.zero_grad()
    assert not masters.gradients()
    assert float(masters.gradient_norm()) == 0.0


@pytest.mark.promise
@pytest.mark.parametrize(("type", "num_steps"), [("adamw", 100), ("muon", 10)])
def test_split_masters_equal_float32_masters_bit_for_bit(type, num_steps):
    """The reference has float32 parameters and torch's optimizer; both get the same gradients in bfloat16."""
    config = OptimConfig(type=type, lr=1e-3, weight_decay=0.1)
    torch.manual_seed(0)
    shapes = {"embed": (50, 48), "matrix": (48, 96), "norm": (48,)}
    split_module = nn.ParameterDict({name: 0.1 * torch.randn(shape) for name, shape in shapes.items()})
    for parameter in split_module.values():
        parameter.data.flatten()[:4] = from_bits(0x3F808000, 0xBF808000, 0x00008000, 0x80000001)
    reference_module = deepcopy(split_module)
    split, reference = MasterWeights(split_module, torch.bfloat16), MasterWeights(reference_module)
    optimizers = [OptimizersContainer(masters, config, None) for masters in (split, reference)]
    assert split.is_split
    assert not reference.is_split
    generator = torch.Generator().manual_seed(0)
    for step in range(num_steps):
        num_packs = 1 + step % 3
        for masters in (split, reference):
            masters.zero_grad(num_packs=num_packs)
        for _ in range(num_packs):
            for parameter, master in zip(split.parameters(), reference.parameters()):
                size = 10.0 ** torch.randint(-6, 1, (), generator=generator)
                gradient = size * torch.randn(parameter.shape, generator=generator)
                (parameter * gradient.bfloat16()).sum().backward()
                gradient = gradient.bfloat16().float()
                master.grad = gradient if master.grad is None else master.grad + gradient
        for masters, optimizer in zip((split, reference), optimizers):
            optimizer.step(step, masters.clip_gradients(1.0))
    for (name, parameter), master in zip(split.named_parameters(), reference.parameters()):
        assert torch.equal(split.to_float32(parameter).view(torch.int32), master.detach().view(torch.int32)), name
        assert torch.equal(parameter, round_to_bfloat16(master.detach())), name


class FailingOperator(TorchDispatchMode):
    """Fails in one operator, as if the device had no more memory."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.remaining = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.remaining -= 1
        if self.remaining == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [False, True])
def test_weights_are_split_also_after_running_out_of_memory(keep):
    torch.manual_seed(0)
    module = nn.ParameterDict({name: torch.randn(4) for name in ("first", "second")})
    masters = MasterWeights(module, torch.bfloat16)
    for number in range(1, 100):
        before = [masters.to_float32(value) for value in masters.parameters()]
        operator = FailingOperator(number)
        try:
            with operator, masters.joined(masters.parameters(), keep=keep):
                for value in module.values():
                    value.data.mul_(2)
            is_complete = True
        except torch.OutOfMemoryError:
            is_complete = False
        after = [masters.to_float32(value) for value in masters.parameters()]
        assert {value.dtype for value in module.values()} == {torch.bfloat16}
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old, new) or (keep and torch.equal(2 * old, new))
        if is_complete:
            break
    assert number > 10
    assert keep == (not torch.equal(before[0], after[0]))


class Float32Peak(TorchDispatchMode):
    """Counts the bytes that float32 tensors on a GPU hold at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_cuda and out.dtype == torch.float32:
            self._alive[out.untyped_storage()] = None
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive))
        return out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_move_to_their_device_one_by_one():
    module = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)), nn.BatchNorm1d(32))
    module[0].requires_grad_(False)
    with Float32Peak() as allocation:
        masters = MasterWeights(module, torch.bfloat16, torch.device("cuda"))
    assert 0 < allocation.peak <= 2 * module[0].weight.numel() * 4
    assert all(value.is_cuda for value in (*module.parameters(), *module.buffers()))
    assert {value.dtype for value in module.parameters()} == {torch.bfloat16}
    remainders = [masters.get_remainder(value) for value in masters.parameters()]
    assert [(value.device.type, value.dtype) for value in remainders] == [("cuda", torch.int16)] * 9
