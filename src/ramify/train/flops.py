"""The FLOPs of a training step: the one formula behind every MFU that is reported.

Each matrix product counts once: two operations per weight and token in the forward pass, four in the backward pass. The
head counts for the pairs that it scores, attention for the visible pairs (two products forward, four backward).
Recomputed activations and padding do not count.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ramify.model.experts import read_expert_counts
from ramify.trace import Forest

FLOPS_FORMULA = (
    "6·(weights in layers)·tokens + 6·vocabulary·width·scored + 12·heads·head_dim·Σ over layers of visible pairs"
)
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16
ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention")  # linear attention has no pairs


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """FLOPs of a model, forward and backward."""

    per_token: float
    per_scored_token: float
    per_visible_pair: float
    """Of one attention layer."""
    layer_windows: tuple[int, ...]
    """The sliding window of each attention layer; 0 if it has none."""

    @classmethod
    def from_model(cls, model: Any) -> "FlopsModel":
        """Read the sizes of a transformers model."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None) or 0  # 0 if no layer attends
        head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        window = getattr(config, "sliding_window", None) or 0
        layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        return cls(
            per_token=6.0 * _count_active_weights(model, config),
            per_scored_token=6.0 * config.vocab_size * config.hidden_size,
            per_visible_pair=12.0 * heads * head_dim,
            layer_windows=tuple(
                window if layer_type == "sliding_attention" else 0
                for layer_type in layer_types
                if layer_type in ATTENTION_LAYER_TYPES
            ),
        )

    def count_flops(self, forest: Forest) -> float:
        """Return the FLOPs of training on a forest."""
        depth = forest.position_ids if forest.position_ids.ndim == 1 else forest.position_ids[0]
        visible = depth[: forest.num_tokens].astype(np.int64) + 1  # a token sees its path
        pairs = sum(
            num_layers * int((np.minimum(visible, window) if window else visible).sum())
            for window, num_layers in Counter(self.layer_windows).items()
        )
        scored = len(forest.unique_head_inputs()[0])
        return self.per_token * forest.num_tokens + self.per_scored_token * scored + self.per_visible_pair * pairs


def _count_active_weights(model: Any, config: Any) -> float:
    """Count the weights of the layers' matrices that process a token; of experts, the share that is routed to."""
    experts = read_expert_counts(config.to_dict())
    expert_share = experts.active / experts.total if experts else 1.0
    layers: nn.Module = model.get_decoder().layers
    return sum(
        value.numel() * (expert_share if "experts" in name and "shared" not in name else 1.0)
        for name, value in layers.named_parameters()
        if value.ndim >= 2
    )


def get_peak_flops(device_name: str) -> float | None:
    """Return the peak FLOPs per second of a device; None if it is unknown."""
    return next((value for name, value in PEAK_FLOPS.items() if name in device_name), None)
