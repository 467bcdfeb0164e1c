"""A trial before the first batch: is there room for the largest step?

A trainer that shares its GPU, or whose memory was estimated wrongly, would fail in the middle of a run. The trial takes
the memory of the largest step, through the same code, and lowers the trainer's limits if it does not fit. The
layers are compiled here instead of in the first step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

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
    """Run a step of two packs of the largest size: forward, backward and the optimizer's update.

    The moments are allocated first, because they are in memory in every step but the first. Afterwards weights,
    optimizer and random state are as before. Images are left out.

    Raises what `Trainer.forward_backward` raises, and GpuMemoryFull if the update does not fit into memory. After an
    error, too, weights and moments are as before, and no gradients are kept.
    """
    device, pack = trainer.device, _build_pack(trainer.activations.limits.pack_tokens, trainer.policy.vocab_size)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), trainer.optimizer.fresh_state():
        try:
            with _report_out_of_memory():
                trainer.master_weights.allocate_gradients()
                trainer.try_optimizer_step()
            trainer.forward_backward(Batch.from_packs(0, [pack, pack]))
            with _report_out_of_memory():
                trainer.try_optimizer_step()
        finally:
            trainer.master_weights.zero_grad()
    trainer.free_memory()


def _build_pack(pack_tokens: int, vocab_size: int) -> Forest:
    """Return a pack of `pack_tokens` tokens, all of which are scored."""
    ids = torch.arange(PATH_TOKENS) % vocab_size
    return concat_forests([build_chain(ids) for _ in range(pack_tokens // PATH_TOKENS)])


@contextmanager
def _report_out_of_memory() -> Iterator[None]:
    """Raise GpuMemoryFull if the block runs out of memory."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        problem = f"gradients, moments and the optimizer's update do not fit: {describe_shortage(error)}"
        raise GpuMemoryFull(f"{problem}; {MEMORY_ADVICE}") from error
