"""What a mixture of experts means for training. Importable without torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

# The types of layers, as a model's config names them in `layer_types`.
ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})  # keep keys and values of every token
RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "conv"})  # keep a state of fixed size
LAYER_TYPE_ALIASES = {"mamba": "linear_attention", "attention": "full_attention"}  # in published configs
OUTER_MATRIX_NAMES = ("embed", "lm_head", "wte", "wpe")  # parts of the names of matrices outside the layers

COUNT_SETTINGS = ("num_local_experts", "num_experts", "n_routed_experts")
ACTIVE_COUNT_SETTINGS = ("num_experts_per_tok", "num_experts_per_token")


class ExpertCounts(NamedTuple):
    """The experts of a layer, and how many of them process a token."""

    total: int
    active: int


def read_expert_counts(hf_config: Mapping[str, Any]) -> ExpertCounts | None:
    """Read the numbers of experts from a Hugging Face config; None if the model has none."""
    settings = hf_config.get("text_config") or hf_config
    total = next((settings[name] for name in COUNT_SETTINGS if settings.get(name)), 0)
    active = next((settings[name] for name in ACTIVE_COUNT_SETTINGS if settings.get(name)), total)
    return ExpertCounts(total, active) if total > 1 else None


def describe_experts(hf_config: Mapping[str, Any]) -> str | None:
    """Return what to know about the experts of a model, for a line at the start of a run; None if it has none."""
    if (counts := read_expert_counts(hf_config)) is None:
        return None
    experts = f"experts: {counts.active} of {counts.total} process a token"
    reason = "router replay is not implemented, so trainer and engine choose them independently"
    return f"{experts}; {reason}. The metric mismatch_kl shows how far their logprobs differ"
