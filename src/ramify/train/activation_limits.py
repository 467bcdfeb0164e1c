"""How much a trainer keeps for the backward pass, and what it does with less memory.

Activations depend on two numbers: the tokens of a pack, and the layers whose activations are recomputed instead of
kept. Neither changes what is computed: recomputed layers give equal gradients, and gradients of packs are summed. So a
trainer that runs out of memory lowers its limits and repeats the step. Lowered limits are stored with the run, for a
trainer that is started again.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ramify.core.errors import GpuMemoryFull, PacksTooLarge
from ramify.core.files import read_bytes, write_atomically
from ramify.run.store import storage_call
from ramify.train.batch import Batch, PackSpec, repack
from ramify.train.config import TrainerConfig
from ramify.train.policy_model import PolicyModel
from ramify.train.recompute import count_recomputable_layers, recompute_layers
from ramify.train.step_sizes import PACK_MULTIPLE

LIMITS_FILE = "activation_limits.json"  # in the directory of the checkpoints
NUM_RECOMPUTE_STEPS = 4  # lowerings of the limits after which all layers are recomputed
MEMORY_ADVICE = "use LoRA, 8-bit moments, a shorter seq_len, more GPUs, or leave the engines less memory"


class ActivationLimits(msgspec.Struct, frozen=True):
    """The tokens of a pack, and the number of layers whose activations the backward pass recomputes."""

    pack_tokens: int
    recompute_layers: int

    @classmethod
    def from_config(cls, config: TrainerConfig) -> "ActivationLimits":
        """Return the limits that a configuration sets, or its defaults."""
        return cls(config.max_pack_tokens, config.num_recomputed_layers)

    def lower(self, num_layers: int, longest_pack: int) -> "ActivationLimits | None":
        """Return limits that take less memory, for packs of up to `longest_pack` tokens; None if there are none.

        Layers are recomputed first: their gradients stay the same to the bit, and nothing new is compiled.
        """
        if self.recompute_layers < num_layers:
            step = -(-num_layers // NUM_RECOMPUTE_STEPS)
            return ActivationLimits(self.pack_tokens, min(num_layers, self.recompute_layers + step))
        half = min(self.pack_tokens, longest_pack) // 2 // PACK_MULTIPLE * PACK_MULTIPLE
        return ActivationLimits(half, self.recompute_layers) if half else None

    def __str__(self) -> str:
        return f"packs of {self.pack_tokens} tokens, {self.recompute_layers} recomputed layers"


LimitsObserver = Callable[[ActivationLimits, ActivationLimits, str], None]


class ActivationBudget:
    """The activations of a policy within limits, which are lowered if its device has no room.

    The trainer's batches are packed for `planned`. `on_lowered` is called with the former limits, the new ones, and
    what could not be allocated.
    """

    def __init__(
        self,
        policy: PolicyModel,
        planned: ActivationLimits,
        *,
        limits: ActivationLimits | None = None,
        num_ranks: int = 1,
        on_lowered: LimitsObserver = lambda former, lowered, reason: None,
    ) -> None:
        self.policy, self.planned, self.num_ranks, self.on_lowered = policy, planned, num_ranks, on_lowered
        self._reason = ""
        self.set_limits(limits or planned)

    def set_limits(self, limits: ActivationLimits) -> None:
        """Use these limits from now on."""
        self.limits = limits
        recompute_layers(self.policy.model, limits.recompute_layers)

    @contextlib.contextmanager
    def report_lowered(self) -> Iterator[None]:
        """Call `on_lowered` once if the limits were lowered in the block."""
        former = self.limits
        yield
        if self.limits != former:
            self.on_lowered(former, self.limits, self._reason)

    def limit_packs(self, batch: Batch) -> Batch:
        """Return the batch in packs within the limits.

        With several ranks, the orchestrator already packs by these limits.
        """
        if self.num_ranks > 1 or self.limits.pack_tokens >= self.planned.pack_tokens:
            return batch
        return repack([batch], PackSpec(self.policy.layout, self.limits.pack_tokens))

    def lower(self, batch: Batch, reason: str) -> None:
        """Lower the limits for a batch that had no room.

        Raises GpuMemoryFull if nothing makes it smaller, and PacksTooLarge if other ranks wait for this one: then the
        next trainer has lower limits.
        """
        former, longest = self.limits, max(map(len, batch.packs))
        lowered = former.lower(count_recomputable_layers(self.policy.model), longest)
        if lowered is not None and self.num_ranks > 1:
            self.on_lowered(former, lowered, reason)
            raise PacksTooLarge(f"this rank has no room for {former}: {reason}; the next trainer has {lowered}")
        self._reason = reason
        self.set_limits(lowered or former)
        is_smaller = lowered is not None and lowered.recompute_layers > former.recompute_layers
        if not is_smaller and max(map(len, self.limit_packs(batch).packs)) >= longest:
            self.set_limits(former)
            problem = f"the GPU has no room for a pack of {longest} tokens, even with all layers recomputed: {reason}"
            raise GpuMemoryFull(f"{problem}; {MEMORY_ADVICE}")


class LoweredLimits(msgspec.Struct, frozen=True):
    """The limits of a run's configuration that took too much memory, and the limits that replaced them."""

    planned: ActivationLimits
    lowered: ActivationLimits


def read_limits(directory: Path, planned: ActivationLimits) -> ActivationLimits:
    """Return the limits that replaced `planned` in the run with this directory, or `planned` if none did."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        stored = msgspec.json.decode(read_bytes(directory / LIMITS_FILE), type=LoweredLimits)
        return stored.lowered if stored.planned == planned else planned
    return planned


def write_limits(directory: Path, planned: ActivationLimits, lowered: ActivationLimits) -> None:
    """Store which limits replace `planned`."""
    with storage_call(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / LIMITS_FILE, msgspec.json.encode(LoweredLimits(planned, lowered)))
