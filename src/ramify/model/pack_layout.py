"""Which shape of training data a model can compute: a forest, or chains.

Attention can be told who sees whom, so it computes a forest as it lies. A recurrent or convolution layer reads its row
from left to right and cannot step back to a fork; such a model gets every root-to-leaf path as a chain of its own. An
attention that adds something the tree attention does not compute is refused by name, before anything is loaded.
Importable without torch.
"""

from enum import Enum
from typing import Any

from ramify.errors import ModelUnsupported

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
TOKENWISE_LAYERS = {"sparse", "dense", "moe", "mlp"}  # layers that look at one token at a time
SEQUENTIAL_LAYERS = {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid", "hybrid_sliding"}
SEQUENTIAL_MODELS = {"rwkv", "xlstm"}  # that do not list their layers
UNSUPPORTED_SETTINGS = {
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
MODELS_WITH_SINKS = {"gpt_oss"}
UNIFORM_SETTINGS = {
    "head_dim",
    "num_attention_heads",
    "sliding_window",
}  # what the trainer takes to be the same in all layers


class PackLayout(Enum):
    """How a batch is laid out for a model."""

    FOREST = "forest"
    CHAINS = "chains"


def choose_pack_layout(config: Any) -> PackLayout:
    """The layout for the model of a Hugging Face `config`; ModelUnsupported names what cannot be computed."""
    text = config.get_text_config()
    kinds = _get_layer_types(text)
    if unknown := sorted(kinds - ATTENTION_LAYERS - TOKENWISE_LAYERS - SEQUENTIAL_LAYERS):
        raise ModelUnsupported(f"{text.model_type} has layers the trainer does not know: {', '.join(unknown)}")
    for name, what in UNSUPPORTED_SETTINGS.items():
        if getattr(text, name, None) not in (None, 1, 1.0):
            raise ModelUnsupported(f"{text.model_type} has {what} ({name}), which the trainer does not compute")
    if own := sorted(get_per_layer_settings(text) & UNIFORM_SETTINGS):
        raise ModelUnsupported(
            f"{text.model_type} has layers that differ in {', '.join(own)}, which the trainer does not compute"
        )
    if text.model_type in MODELS_WITH_SINKS:
        raise ModelUnsupported(f"{text.model_type} has attention sinks, which the trainer does not compute")
    if config.is_encoder_decoder:
        raise ModelUnsupported(f"{text.model_type} is an encoder and a decoder; the trainer knows decoders alone")
    if kinds & SEQUENTIAL_LAYERS or text.model_type in SEQUENTIAL_MODELS:
        return PackLayout.CHAINS
    _check_attention_is_pluggable(config)
    return PackLayout.FOREST


def describe_pack_layout(config: Any) -> str:
    """The layout of a model and its reason, for a line at the start of a run."""
    if choose_pack_layout(config) is PackLayout.FOREST:
        return "forest: shared prefixes are computed once"
    text = config.get_text_config()
    kinds = ", ".join(sorted(_get_layer_types(text) & SEQUENTIAL_LAYERS)) or "recurrent"
    return f"chains: {text.model_type} has {kinds} layers, which read from left to right; every path is computed whole"


def get_per_layer_settings(text_config: Any) -> set[str]:
    """What some layers have of their own; transformers raises where the config is asked for it."""
    return {name for layer in (text_config.to_dict().get("per_layer_config") or {}).values() for name in layer}


def get_longrope_limit(text_config: Any) -> int | None:
    """The positions a sequence may have where it turns tokens by longrope: beyond them all of it is turned by other
    angles, what came before included. But a cache has turned that already, and a row has sequences on both sides."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = (rope, *(kind for kind in rope.values() if isinstance(kind, dict)))
    return min(
        (kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"),
        default=None,
    )


def _check_attention_is_pluggable(config: Any) -> None:
    """Some models take the name of an attention function when they are loaded, and never call it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # and with it torch

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ModelUnsupported(f"transformers has no causal language model of type {config.model_type}")
    if not kind.is_backend_compatible():
        raise ModelUnsupported(f"{config.model_type} computes attention by itself: it cannot be told who sees whom")


def _get_layer_types(text_config: Any) -> set[str]:
    lists = (getattr(text_config, name, None) or () for name in ("layer_types", "layers_block_type", "block_types"))
    return {kind for kinds in lists for kind in kinds}
