"""The FLOPs of a training step: the one formula behind every MFU that is reported.

Each matrix product counts once: two operations per weight and token in the forward pass, four in the backward pass. The
head counts for the pairs that it scores, attention for the visible pairs (two products forward, four backward).
Recomputed activations and padding do not count.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from ramify.model.layer_types import ATTENTION_LAYER_TYPES
from ramify.model.weight_counts import WeightCounts
from ramify.trace import Forest

FLOPS_FORMULA = (
    "6·(weights in layers)·tokens + 6·vocabulary·width·scored + 12·heads·head_dim·Σ over layers of visible pairs"
)


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
        weights = WeightCounts.from_model(model)
        return cls(
            per_token=6.0 * weights.active,
            per_scored_token=6.0 * weights.head,
            per_visible_pair=12.0 * heads * head_dim,
            layer_windows=tuple(
                window if layer_type == "sliding_attention" else 0
                for layer_type in layer_types
                if layer_type in ATTENTION_LAYER_TYPES  # recurrent layers have no pairs
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
