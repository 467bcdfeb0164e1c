"""Which layout of training data a model can compute: forests or chains.

Attention takes a mask, so it computes a forest as it is. A recurrent or convolution layer reads its row from left to
right and cannot return to a fork, unless it is one of `FOREST_RECURRENT_MODELS`, whose layers are replaced. Another
model with such layers gets every root-to-leaf path as a chain of its own. A model with an
attention feature that tree attention does not compute is rejected by name, before anything is loaded. Importable
without torch.
"""

from enum import Enum
from typing import Any

from ramify.core.errors import ModelUnsupported

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
TOKENWISE_LAYERS = {"sparse", "dense", "moe", "mlp"}  # layers that compute each token by itself
SEQUENTIAL_LAYERS = {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid", "hybrid_sliding"}
# Models whose recurrent layers `ramify.model.recurrent_layers` computes over forests.
FOREST_RECURRENT_MODELS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm2_moe"}
SEQUENTIAL_MODELS = {"rwkv", "xlstm"}  # models that do not list their layers
CONV_WIDTH_SETTINGS = ("linear_conv_kernel_dim", "conv_L_cache")
MAX_CONV_WIDTH = 4  # tokens that a convolution over a forest reads
VISION_MODEL_TYPES = {"idefics3", "smolvlm", "qwen3_vl"}  # vision-language models whose images are read
MODELS_WITH_SINKS = {"gpt_oss", "granite_swa", "granitemoe_swa"}
TRAINER_UNIFORM_SETTINGS = {"head_dim", "num_attention_heads", "sliding_window"}  # one value for all layers


class PackLayout(Enum):
    """How a batch is packed for a model."""

    FOREST = "forest"
    CHAINS = "chains"


def choose_pack_layout(config: Any) -> PackLayout:
    """Return the layout for the model of a Hugging Face `config`. Raises ModelUnsupported."""
    text_config = config.get_text_config()
    model_type, layer_types = text_config.model_type, _get_layer_types(text_config)
    if unknown := sorted(layer_types - ATTENTION_LAYERS - TOKENWISE_LAYERS - SEQUENTIAL_LAYERS):
        raise ModelUnsupported(f"{model_type} has layers that the trainer does not know: {', '.join(unknown)}")
    if getattr(text_config, "kv_lora_rank", None):
        raise ModelUnsupported(
            f"{model_type} has latent keys and values (kv_lora_rank), which the trainer does not compute"
        )
    if varying := sorted(get_per_layer_settings(text_config) & TRAINER_UNIFORM_SETTINGS):
        raise ModelUnsupported(
            f"{model_type} has layers that differ in {', '.join(varying)}, which the trainer does not compute"
        )
    if config.is_encoder_decoder:
        raise ModelUnsupported(f"{model_type} has an encoder and a decoder; the trainer supports only decoders")
    if has_forest_recurrence(text_config):
        return PackLayout.FOREST
    if layer_types & SEQUENTIAL_LAYERS or model_type in SEQUENTIAL_MODELS:
        return PackLayout.CHAINS
    _check_attention_is_pluggable(config)
    return PackLayout.FOREST


def describe_pack_layout(config: Any) -> str:
    """Return the layout of a model and the reason, for a line at the start of a run."""
    text_config = config.get_text_config()
    layers = ", ".join(sorted(_get_layer_types(text_config) & SEQUENTIAL_LAYERS))
    if choose_pack_layout(config) is PackLayout.FOREST:
        forks = f"; the states of {layers} layers fork where it does" if layers else ""
        return f"forest: shared prefixes are computed once{forks}"
    layers = layers or "recurrent"
    reason = f"{text_config.model_type} has {layers} layers, which read from left to right"
    return f"chains: {reason}; every path is computed whole (forest/chain_cost is what that costs)"


def has_forest_recurrence(text_config: Any) -> bool:
    """Return whether a model has recurrent layers that compute forests."""
    widths = (getattr(text_config, name, None) or 0 for name in CONV_WIDTH_SETTINGS)
    is_sequential = bool(_get_layer_types(text_config) & SEQUENTIAL_LAYERS)
    return is_sequential and text_config.model_type in FOREST_RECURRENT_MODELS and max(widths) <= MAX_CONV_WIDTH


def has_plain_scores(text_config: Any) -> bool:
    """Return whether attention is a softmax of products, without sinks or a soft cap."""
    has_softcap = getattr(text_config, "attn_logit_softcapping", None) is not None
    return not has_softcap and text_config.model_type not in MODELS_WITH_SINKS


def get_per_layer_settings(text_config: Any) -> set[str]:
    """Return the settings that differ between layers; transformers raises if the config is asked for one of them."""
    return {name for layer in (text_config.to_dict().get("per_layer_config") or {}).values() for name in layer}


def get_longrope_limit(text_config: Any) -> int | None:
    """Return the longest sequence that keeps the short longrope angles, or None without longrope.

    Beyond it longrope changes the angles of all earlier tokens too, which neither a KV cache nor a pack of mixed
    lengths allows.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    tables = (rope, *(table for table in rope.values() if isinstance(table, dict)))
    return min(
        (table["original_max_position_embeddings"] for table in tables if table.get("rope_type") == "longrope"),
        default=None,
    )


def _check_attention_is_pluggable(config: Any) -> None:
    """Reject models that accept an attention implementation but never call it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING  # and with it torch

    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if config.model_type in VISION_MODEL_TYPES:
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model_class: Any = mapping.get(type(config), None)
    if model_class is None:
        raise ModelUnsupported(f"transformers has no causal language model of type {config.model_type}")
    if not model_class.is_backend_compatible():
        raise ModelUnsupported(
            f"{config.model_type} does not support custom attention functions, which tree attention needs"
        )


def _get_layer_types(text_config: Any) -> set[str]:
    names = ("layer_types", "layers_block_type", "block_types")
    return {layer_type for name in names for layer_type in getattr(text_config, name, None) or ()}
