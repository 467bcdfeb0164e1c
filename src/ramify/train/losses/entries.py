"""What a loss sees, and what it says: columns of entries in, one number per entry out.

A loss is a pure function of `Entries`. It only calls methods of tensors, so it can be found, and its options checked,
without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, frozen=True, eq=False)
class Entries:
    """The entries that one component applies to, by column; logprobs are at each entry's temperature."""

    logprob: Tensor  # of the policy that is trained: gradients flow through it
    sampler_logprob: Tensor  # of the policy that sampled; NaN where only ce applies
    advantage: Tensor
    reference_logprob: Tensor  # of the reference model; NaN where none is known
    sequence_index: Tensor  # which model call an entry belongs to, from 0
    num_sequences: int  # how many there are

    @property
    def log_ratio(self) -> Tensor:
        """lr = logπ − logπ_sampler."""
        return self.logprob - self.sampler_logprob

    def mean_by_sequence(self, values: Tensor) -> Tensor:
        """The mean of `values` over the entries of each entry's model call."""
        zeros = values.new_zeros(self.num_sequences)
        counts = zeros.index_add(0, self.sequence_index, values.detach() * 0 + 1)
        return (zeros.index_add(0, self.sequence_index, values) / counts.clamp(min=1))[self.sequence_index]


class LossTerm(NamedTuple):
    """The loss of each entry, and which entries were masked: dropped, or clipped so that no gradient flows."""

    loss: Tensor
    masked: Tensor | None = None


LossFunction = Callable[[Entries], LossTerm]
