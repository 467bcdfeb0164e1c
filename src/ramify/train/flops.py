"""What a step costs, by the one formula behind every MFU we print.

Each matrix product counts once: two operations per weight and token forward, four backward. The head counts for the
pairs it scores, attention for the pairs it sees (two products forward, four backward). Nothing that is computed again
counts, nor padding.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ramify.trace import Forest

FLOPS_FORMULA = (
    "6·(weights in layers)·tokens + 6·vocabulary·width·scored + 12·heads·head_dim·Σ over layers of visible pairs"
)
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16
ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention")  # kinds of layers; a linear one has no pairs


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """What a model spends on a token, on a scored pair, and on a visible pair of each attention layer."""

    per_token: float
    per_scored_token: float
    per_visible_pair: float
    layer_windows: tuple[int, ...]  # of each attention layer, 0 is none

    @classmethod
    def from_model(cls, model: Any) -> "FlopsModel":
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None) or 0  # none where no layer attends
        width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        window = getattr(config, "sliding_window", None) or 0
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        windows = [window if kind == "sliding_attention" else 0 for kind in kinds if kind in ATTENTION_LAYER_TYPES]
        return cls(
            per_token=6.0 * _count_active_weights(model, config),
            per_scored_token=6.0 * config.vocab_size * config.hidden_size,
            per_visible_pair=12.0 * heads * width,
            layer_windows=tuple(windows),
        )

    def count_flops(self, forest: Forest) -> float:
        """The cost of training on a forest, forward and backward."""
        depth = forest.position_ids if forest.position_ids.ndim == 1 else forest.position_ids[0]
        seen = depth[: forest.num_tokens].astype(np.int64) + 1  # a token sees its path
        pairs = sum(
            layers * int((np.minimum(seen, window) if window else seen).sum())
            for window, layers in Counter(self.layer_windows).items()
        )
        return (
            self.per_token * forest.num_tokens
            + self.per_scored_token * len(forest.unique_head_inputs()[0])
            + self.per_visible_pair * pairs
        )


def _count_active_weights(model: Any, config: Any) -> float:
    """Weights of the layers' matrices that a token meets; of experts, its share."""
    share = 1.0
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        share = getattr(config, "num_experts_per_tok", experts) / experts
    layers: nn.Module = model.get_decoder().layers
    return sum(
        value.numel() * (share if "experts" in name and "shared" not in name else 1.0)
        for name, value in layers.named_parameters()
        if value.ndim >= 2
    )


def get_peak_flops(device_name: str) -> float | None:
    """The most a device can do in a second; None where we do not know."""
    return next((value for name, value in PEAK_FLOPS.items() if name in device_name), None)
