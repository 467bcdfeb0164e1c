"""The memory for the states of recurrent layers, in slots.

An attention layer keeps the keys and values of every token. A recurrent layer keeps a state of fixed size, which
every token changes: a convolution its last inputs, linear attention a matrix. Each request and each snapshot has a
slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

StateKind = Literal["conv", "recurrent"]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of a layer's state. `shape` is for one sequence."""

    layer: int
    kind: StateKind
    index: int  # a layer may have several of a kind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of one sequence."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


STATE_ALIGNMENT = 256  # bytes


class StatePool:
    """The memory of all states. `tensors` has a view for each spec, [num_slots, *shape]; a slot is contiguous."""

    def __init__(self, specs: Sequence[StateSpec], num_slots: int, device: torch.device) -> None:
        self.specs = specs
        starts = [0]
        for spec in specs:
            starts.append(starts[-1] + -(-spec.nbytes // STATE_ALIGNMENT) * STATE_ALIGNMENT)
        self._memory = torch.zeros(num_slots, starts[-1], dtype=torch.uint8, device=device)
        self.tensors = [
            self._memory[:, start : start + spec.nbytes].view(spec.dtype).unflatten(1, spec.shape)
            for start, spec in zip(starts, specs)
        ]
        self._tensor_index = {(spec.layer, spec.kind): index for index, spec in enumerate(specs) if not spec.index}

    def get_tensor(self, layer: int, kind: StateKind) -> Tensor:
        """Return the states of a layer in all slots, if it has one of this kind."""
        return self.tensors[self._tensor_index[layer, kind]]

    def clear(self, slot: int) -> None:
        """Set a slot to the state before the first token."""
        self._memory[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy the state of one slot to another."""
        self._memory[target].copy_(self._memory[source])

    def load(self, slots: Tensor) -> list[Tensor]:
        """Return copies of the states in these slots, a batch for each spec."""
        return [tensor.index_select(0, slots) for tensor in self.tensors]

    def store(self, slots: Tensor, states: Sequence[Tensor]) -> None:
        """Store a batch for each spec."""
        for tensor, state in zip(self.tensors, states):
            tensor.index_copy_(0, slots, state)
