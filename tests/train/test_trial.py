"""The trial of a trainer takes the memory of a whole step, with the optimizer's update, and changes nothing."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from ramify.core.errors import GpuMemoryFull
from ramify.model.lora import add_adapters
from ramify.train import Trainer, TrainerConfig
from ramify.train.distributed import apply_fsdp
from ramify.train.trial import run_trial
from tests.support.training import SINGLE_RANK, SIZES, build_policy, random_batches

SMALL = LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
SHORTAGE = "CUDA error: out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated memory is large try this"
UNSPLIT_MUON_MARKS = pytest.mark.full("AdamW has unsplit weights, and Muon split ones")
FINITE_CHECK = {f"aten::{name}" for name in ("abs", "ne.Scalar", "eq.Tensor", "mul.Tensor", "bitwise_not")}
FINITE_CHECK |= {"aten::_to_copy", "aten::_local_scalar_dense"}  # of the gradient norm


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that run, except copies."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "copy" not in func.name():
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def count_operators(function: Callable[[], object]) -> Counter[str]:
    with OperatorCounter() as counter:
        function()
    return counter.counts


def build_trainer(optim: dict, dtype: torch.dtype, lora: bool = False) -> Trainer:
    policy = build_policy(SMALL)
    if lora:
        add_adapters(policy.model, 4, 8.0, ["q_proj", "down_proj"])
    for parameter in policy.parameters():
        parameter.data.view(-1)[:2] = torch.tensor([-0.0, torch.inf])  # which an update by 0 may change
    config = TrainerConfig.model_validate({"pack_tokens": 128, "optim": {"weight_decay": 0.1, **optim}})
    return Trainer(policy, config, dtype=dtype)


def add_gradients(trainer: Trainer, seed: int) -> None:
    """Add random gradients of two packs."""
    generator = torch.Generator().manual_seed(seed)
    trainer.master_weights.zero_grad(num_packs=2)
    for _ in range(2):
        for parameter in trainer.master_weights.parameters():
            (parameter * torch.randn(parameter.shape, generator=generator)).sum().backward()


def update(trainer: Trainer, step: int) -> None:
    add_gradients(trainer, step)
    trainer.optimizer_step(step)


def get_bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the bits of all weights and of the optimizers' state."""
    masters, tensors = trainer.master_weights, dict(trainer.policy.named_parameters())
    states = {item: state for optimizer in trainer.optimizer.optimizers for item, state in optimizer.state.items()}
    for name, parameter in masters.named_parameters():
        tensors |= {f"{name}/{field}": value for field, value in states.get(parameter, {}).items()}
        if (remainder := masters.get_remainder(parameter)) is not None:
            tensors[f"{name}/remainder"] = remainder
    return {name: value.detach().clone().contiguous().reshape(-1).view(torch.uint8) for name, value in tensors.items()}


@pytest.mark.promise
@pytest.mark.parametrize(
    ("optim", "dtype", "lora"),
    [
        ({}, torch.float32, False),
        ({}, torch.bfloat16, False),
        ({"moments": "8bit"}, torch.bfloat16, False),
        pytest.param({"type": "muon"}, torch.float32, False, marks=UNSPLIT_MUON_MARKS),
        ({"type": "muon"}, torch.bfloat16, False),
        ({}, torch.bfloat16, True),
    ],
    ids=["adamw", "split", "8bit", "muon", "split-muon", "lora"],
)
def test_a_trial_changes_no_bit_of_weights_moments_and_counters(optim, dtype, lora):
    trainer, num_updates = build_trainer(optim, dtype, lora), Counter[int]()
    for number, optimizer in enumerate(trainer.optimizer.optimizers):
        optimizer.register_step_post_hook(lambda *_, number=number: num_updates.update([number]))
    for is_fresh in (True, False):
        before = get_bits(trainer)
        assert any(name.endswith("/step") for name in before) != is_fresh
        num_updates.clear()
        run_trial(trainer)
        assert set(num_updates) == set(range(len(trainer.optimizer.optimizers)))
        after = get_bits(trainer)
        assert after.keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in after.items())
        assert not trainer.master_weights.gradients()
        update(trainer, 0)


@pytest.mark.parametrize(
    ("optim", "dtype"),
    [({}, torch.float32), ({"moments": "8bit"}, torch.bfloat16), ({"type": "muon"}, torch.bfloat16)],
)
def test_a_trial_update_runs_the_operators_of_a_real_one(optim, dtype):
    trainer = build_trainer(optim, dtype)
    tried = []
    for seed in range(2):  # the first one allocates the moments
        add_gradients(trainer, seed)
        tried.append(count_operators(trainer.try_optimizer_step))
    trainer = build_trainer(optim, dtype)
    for step in range(2):
        add_gradients(trainer, step)
        real = count_operators(lambda step=step: trainer.optimizer_step(step))
        assert set(real - tried[step]) <= FINITE_CHECK
        assert real["aten::_fused_adamw_"] + real["aten::_fused_adamw_.tensor_lr"] > 0
        assert (real["aten::addmm"] > 0) == (optim.get("type") == "muon")


@pytest.mark.parametrize("optimizer_type", ["adamw", "muon"])
def test_moments_and_summed_gradients_are_in_memory(optimizer_type):
    trainer, num_states, gradients = build_trainer({"type": optimizer_type}, torch.bfloat16), [], []
    masters = trainer.master_weights
    trainer.policy.register_forward_pre_hook(
        lambda *_: num_states.append(sum(len(optimizer.state) for optimizer in trainer.optimizer.optimizers))
    )
    trainer.optimizer.optimizers[0].register_step_pre_hook(lambda *_: gradients.append(masters.gradients()))
    run_trial(trainer)
    assert num_states == [len(masters.parameters())] * 2
    assert len(gradients) == 2
    assert gradients[1].keys() == set(masters.parameters())
    assert {value.dtype for item in gradients for value in item.values()} == {torch.float32}


def fail(*_):
    raise torch.OutOfMemoryError(SHORTAGE)


@pytest.mark.parametrize(
    ("optim", "dtype"),
    [
        ({}, torch.float32),
        pytest.param({"type": "muon"}, torch.float32, marks=UNSPLIT_MUON_MARKS),
        ({"type": "muon"}, torch.bfloat16),
    ],
    ids=["adamw", "muon", "split-muon"],
)
def test_a_trial_without_room_for_the_update_fails_by_name_and_changes_no_bit(optim, dtype):
    trainer = build_trainer(optim, dtype)
    update(trainer, 0)
    before = get_bits(trainer)
    for optimizer in (trainer.optimizer.optimizers[-1], trainer.optimizer.optimizers[0]):  # Muon is the first
        optimizer.register_step_post_hook(fail)
        with pytest.raises(GpuMemoryFull, match=r"gradients, moments and the op.* do not fit: .*2\.00 GiB\.; use LoRA"):
            run_trial(trainer)
        after = get_bits(trainer)
        assert after.keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in after.items())
        assert not trainer.master_weights.gradients()


def test_a_trial_of_a_sharded_trainer_changes_no_bit(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        policy = build_policy(SMALL)
        apply_fsdp(policy, SINGLE_RANK, torch.bfloat16)
        config = TrainerConfig.model_validate({"pack_tokens": 128, "optim": {"type": "muon", "weight_decay": 0.1}})
        trainer, num_updates, gradients = Trainer(policy, config), Counter[int](), []
        masters = trainer.master_weights
        assert all(isinstance(parameter, DTensor) for parameter in masters.parameters())
        for number, optimizer in enumerate(trainer.optimizer.optimizers):
            optimizer.register_step_post_hook(lambda *_, number=number: num_updates.update([number]))
            optimizer.register_step_pre_hook(lambda *_: gradients.append(masters.gradients()))
        trainer.step(random_batches(1)[0])
        before = {name: parameter.full_tensor().clone() for name, parameter in masters.named_parameters()}
        run_trial(trainer)
        assert num_updates == {0: 3, 1: 3}
        assert all(len(item) == len(before) for item in gradients)
        for name, parameter in masters.named_parameters():
            assert torch.equal(parameter.full_tensor().view(torch.int32), before[name].view(torch.int32)), name
        assert not masters.gradients()
    finally:
        dist.destroy_process_group()
