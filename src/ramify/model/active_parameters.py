"""How many weights of a model process a token."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ramify.model.experts import read_expert_counts


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """The elements of the matrices: in layers, in experts, and in the head."""

    dense: int
    experts: int
    head: int
    expert_share: float  # the share of the experts that processes a token

    @classmethod
    def from_model(cls, model: Any) -> "WeightCounts":
        """Count the weights of a transformers model."""
        config = model.config.get_text_config()
        layers: nn.Module = model.get_decoder().layers
        matrices = {name: value.numel() for name, value in layers.named_parameters() if value.ndim >= 2}
        num_expert_weights = sum(size for name, size in matrices.items() if "experts" in name and "shared" not in name)
        counts = read_expert_counts(config.to_dict())
        return cls(
            dense=sum(matrices.values()) - num_expert_weights,
            experts=num_expert_weights,
            head=config.vocab_size * config.hidden_size,
            expert_share=counts.active / counts.total if counts else 1.0,
        )

    @property
    def active(self) -> float:
        """The weights of the layers that process a token."""
        return self.dense + self.expert_share * self.experts
