"""Which shape of training data a model can compute: a forest, or chains.

Attention can be told who sees whom, so it computes a forest as it lies. A recurrent or convolution layer reads its row
from left to right and cannot step back to a fork; such a model gets every root-to-leaf path as a chain of its own. An
attention that adds something the tree attention does not compute is refused by name, before anything is loaded.
Importable without torch.
"""

from enum import Enum
from typing import Any

from ramify.errors import ModelUnsupported

ATTENTION = {"full_attention", "sliding_attention", "attention"}
FREE = {"sparse", "dense", "moe", "mlp"}  # layers that look at one token at a time
SEQUENTIAL = {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid", "hybrid_sliding"}
SEQUENTIAL_MODELS = {"rwkv", "xlstm"}  # that do not list their layers
REFUSED = {
    "attn_logit_softcapping": "softcapped attention scores",
    "final_logit_softcapping": "softcapped logits",
    "logits_soft_cap": "softcapped logits",
    "output_logit_soft_cap": "softcapped logits",
    "logit_scale": "scaled logits",
    "logits_scaling": "scaled logits",
    "lm_head_multiplier": "scaled logits",
    "output_multiplier": "scaled logits",
    "logits_mup_width_multiplier": "scaled logits",
    "kv_lora_rank": "latent keys and values",
}
SINKS = {"gpt_oss"}
SHARED = {"head_dim", "num_attention_heads", "sliding_window"}  # what the trainer takes to be the same in all layers


class Layout(Enum):
    """How a batch is laid out for a model."""

    FOREST = "forest"
    CHAINS = "chains"


def layout_for(config: Any) -> Layout:
    """The layout for the model of a Hugging Face `config`; ModelUnsupported names what cannot be computed."""
    text = config.get_text_config()
    kinds = _kinds(text)
    if unknown := sorted(kinds - ATTENTION - FREE - SEQUENTIAL):
        raise ModelUnsupported(f"{text.model_type} has layers the trainer does not know: {', '.join(unknown)}")
    for name, what in REFUSED.items():
        if getattr(text, name, None) not in (None, 1, 1.0):
            raise ModelUnsupported(f"{text.model_type} has {what} ({name}), which the trainer does not compute")
    if own := sorted(own_settings(text) & SHARED):
        raise ModelUnsupported(
            f"{text.model_type} has layers that differ in {', '.join(own)}, which the trainer does not compute"
        )
    if text.model_type in SINKS:
        raise ModelUnsupported(f"{text.model_type} has attention sinks, which the trainer does not compute")
    if config.is_encoder_decoder:
        raise ModelUnsupported(f"{text.model_type} is an encoder and a decoder; the trainer knows decoders alone")
    if kinds & SEQUENTIAL or text.model_type in SEQUENTIAL_MODELS:
        return Layout.CHAINS
    _refuse_deaf(config)
    return Layout.FOREST


def explain(config: Any) -> str:
    """The layout of a model and its reason, for a line at the start of a run."""
    if layout_for(config) is Layout.FOREST:
        return "forest: shared prefixes are computed once"
    text = config.get_text_config()
    kinds = ", ".join(sorted(_kinds(text) & SEQUENTIAL)) or "recurrent"
    return f"chains: {text.model_type} has {kinds} layers, which read from left to right; every path is computed whole"


def own_settings(text: Any) -> set[str]:
    """What some layers have of their own; transformers raises where the config is asked for it."""
    return {name for layer in (text.to_dict().get("per_layer_config") or {}).values() for name in layer}


def longrope(text: Any) -> int | None:
    """The positions a sequence may have where it turns tokens by longrope: beyond them all of it is turned by other
    angles, what came before included. But a cache has turned that already, and a row has sequences on both sides."""
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = (rope, *(kind for kind in rope.values() if isinstance(kind, dict)))
    return min(
        (kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"),
        default=None,
    )


def _refuse_deaf(config: Any) -> None:
    """Some models take the name of an attention function when they are loaded, and never call it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # and with it torch

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ModelUnsupported(f"transformers has no causal language model of type {config.model_type}")
    if not kind.is_backend_compatible():
        raise ModelUnsupported(f"{config.model_type} computes attention by itself: it cannot be told who sees whom")


def _kinds(text: Any) -> set[str]:
    lists = (getattr(text, name, None) or () for name in ("layer_types", "layers_block_type", "block_types"))
    return {kind for kinds in lists for kind in kinds}
