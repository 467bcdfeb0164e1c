"""A trial before the first batch: is there room for the largest step?

A trainer that shares its GPU, or whose memory was estimated wrongly, would fail in the middle of a run. The trial takes
the memory of the largest step, through the same code, and lowers the trainer's limits if it does not fit. The
layers are compiled here instead of in the first step.
"""

import math

import torch

from ramify.core.errors import GpuMemoryFull
from ramify.model.device_memory import describe_shortage, is_out_of_memory
from ramify.trace import Forest, concat_forests
from ramify.train.activation_limits import MEMORY_ADVICE
from ramify.train.batch import Batch
from ramify.train.policy_model import build_chain
from ramify.train.trainer import Trainer

PATH_TOKENS = 128  # of a path in the packs of a trial: short, so that every model can read it


def run_trial(trainer: Trainer) -> None:
    """Run forward and backward over two packs of the largest size, with the optimizer's moments in memory.

    Afterwards weights, optimizer and random state are as before. Images are left out.

    Raises what `Trainer.forward_backward` raises, and GpuMemoryFull if the moments do not fit.
    """
    device, pack = trainer.device, _build_pack(trainer.activations.limits.pack_tokens, trainer.policy.vocab_size)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        _allocate_moments(trainer)
        trainer.forward_backward(Batch.from_packs(0, [pack, pack]))
    for optimizer in trainer.optimizer.optimizers:
        optimizer.state.clear()
    trainer.free_memory()


def _build_pack(pack_tokens: int, vocab_size: int) -> Forest:
    """Return a pack of `pack_tokens` tokens, all of which are scored."""
    ids = torch.arange(PATH_TOKENS) % vocab_size
    return concat_forests([build_chain(ids) for _ in range(pack_tokens // PATH_TOKENS)])


def _allocate_moments(trainer: Trainer) -> None:
    """Make the optimizers allocate their state, by an update that they skip: its gradient norm is not finite.

    Muon allocates nothing in such an update, so its momentum is added.
    """
    try:
        for parameter in trainer.master_weights.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trainer.optimizer.update(0.0, torch.full((), math.inf, device=trainer.device))
        for optimizer in trainer.optimizer.optimizers:
            for parameter in _list_parameters(optimizer) if isinstance(optimizer, torch.optim.Muon) else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.float32)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        problem = f"there is no room for gradients and moments: {describe_shortage(error)}"
        raise GpuMemoryFull(f"{problem}; {MEMORY_ADVICE}") from error


def _list_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
