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
    frozen: float  # weights of the layers that process a token and are not trained

    @classmethod
    def from_model(cls, model: Any) -> "WeightCounts":
        """Count the weights of a transformers model."""
        config = model.config.get_text_config()
        layers: nn.Module = model.get_decoder().layers
        counts = read_expert_counts(config.to_dict())
        expert_share = counts.active / counts.total if counts else 1.0
        dense, experts, frozen = 0, 0, 0.0
        for name, value in layers.named_parameters():
            is_expert = "experts" in name and "shared" not in name
            size = value.numel() if value.ndim >= 2 else 0
            dense, experts = dense + size * (not is_expert), experts + size * is_expert
            frozen += 0.0 if value.requires_grad else size * (expert_share if is_expert else 1.0)
        quantized = sum(
            module.in_features * module.out_features
            for module in layers.modules()
            if isinstance(module, nn.Linear) and getattr(module, "weight_codes", None) is not None
        )
        dense, frozen = dense + quantized, frozen + quantized
        return cls(dense, experts, config.vocab_size * config.hidden_size, expert_share, frozen)

    @property
    def active(self) -> float:
        """The weights of the layers that process a token."""
        return self.dense + self.expert_share * self.experts
