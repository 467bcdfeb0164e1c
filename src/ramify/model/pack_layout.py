"""Which layout of training data a model can compute: forests or chains.

Attention takes a mask, so it computes a forest as it is. A recurrent or convolution layer reads its row from left to
right and cannot return to a fork, unless it is one of `FOREST_RECURRENT_MODELS`, whose layers are replaced. Another
model with such layers gets every root-to-leaf path as a chain of its own. A model with an
attention feature that tree attention does not compute is rejected by name, before anything is loaded. Importable
without torch, which only the checks of transformers' tables load.
"""

from enum import Enum
from typing import Any

from ramify.core.errors import ModelUnsupported

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
TOKENWISE_LAYERS = {"sparse", "dense", "moe", "mlp"}  # layers that compute each token by itself
SEQUENTIAL_LAYERS = {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid", "hybrid_sliding"}
# Models whose recurrent layers `ramify.model.recurrent_layers` computes over forests.
FOREST_RECURRENT_MODELS = {
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "granitemoehybrid",
    "bamba",
    "nemotron_h",
    "falcon_h1",
    "lfm2",
    "lfm2_moe",
}
# Models whose configs do not show what is missing, and the reason.
NO_ARGUMENTS = "attention that does not receive the arguments of its model's forward"
UNSUPPORTED_BY_TRAINER = {
    **dict.fromkeys(
        ("ctrl", "gpt2", "gpt_bigcode", "hrm_text", "rwkv", "xlstm"),
        "no list of layers, which the trainer compiles and shards",
    ),
    **dict.fromkeys(("moshi", "nemotron"), NO_ARGUMENTS),
}
UNSUPPORTED_BY_ENGINE = {
    "minimax": "a cache of its own, whose states the engine cannot store",
    **dict.fromkeys(("moshi", "nemotron"), NO_ARGUMENTS),
}
CONV_WIDTH_SETTINGS = ("linear_conv_kernel_dim", "conv_L_cache", "mamba_d_conv", "conv_kernel")
MAX_CONV_WIDTH = 4  # tokens that a convolution over a forest reads
VISION_MODEL_TYPES = {"idefics3", "smolvlm", "qwen3_vl"}  # vision-language models whose images are read
# Vision-language models of which transformers loads the text part alone, as a causal language model.
TEXT_PART_MODEL_TYPES = {"emu3", "llama4", "mllama", "qwen3_5", "qwen3_5_moe", "qwen4_exp"}
MODELS_WITH_SINKS = {"gpt_oss", "granite_swa", "granitemoe_swa"}
SIZE_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
TRAINER_UNIFORM_SETTINGS = {"head_dim", "num_attention_heads", "sliding_window"}  # one value for all layers


class PackLayout(Enum):
    """How a batch is packed for a model."""

    FOREST = "forest"
    CHAINS = "chains"


def choose_pack_layout(config: Any) -> PackLayout:
    """Return the layout for the model of a Hugging Face `config`. Raises ModelUnsupported."""
    check_is_decoder(config)
    check_sizes(config)
    text_config = config.get_text_config()
    model_type, layer_types = text_config.model_type, _get_layer_types(text_config)
    if problem := UNSUPPORTED_BY_TRAINER.get(model_type):
        raise ModelUnsupported(f"{model_type} has {problem}")
    if unknown := sorted(layer_types - ATTENTION_LAYERS - TOKENWISE_LAYERS - SEQUENTIAL_LAYERS):
        raise ModelUnsupported(f"{model_type} has layers that the trainer does not know: {', '.join(unknown)}")
    if varying := sorted(get_per_layer_settings(text_config) & TRAINER_UNIFORM_SETTINGS):
        raise ModelUnsupported(
            f"{model_type} has layers that differ in {', '.join(varying)}, which the trainer does not compute"
        )
    if problem := find_head_problem(text_config):
        raise ModelUnsupported(f"{model_type} has {problem}, which the trainer does not compute")
    is_sequential = bool(layer_types & SEQUENTIAL_LAYERS)
    if not is_sequential:
        check_attention_is_pluggable(config)
    check_not_quantized(config)  # last: other weights would not change the other reasons
    return PackLayout.CHAINS if is_sequential and not has_forest_recurrence(text_config) else PackLayout.FOREST


def check_is_decoder(config: Any) -> None:
    """Reject encoders, and models with an encoder and a decoder, by their config."""
    text_config = config.get_text_config()
    if config.is_encoder_decoder or text_config.is_encoder_decoder:
        raise ModelUnsupported(f"{config.model_type} has an encoder and a decoder; only decoders are supported")
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if text_config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(text_config, "is_decoder", False):
        raise ModelUnsupported(f"{config.model_type} is an encoder, which attends to later tokens")


def check_sizes(config: Any) -> None:
    """Raise ModelUnsupported if a size in the config is not positive."""
    text_config = config.get_text_config()
    per_layer_settings = get_per_layer_settings(text_config)
    for name in SIZE_SETTINGS:
        value = None if name in per_layer_settings else getattr(text_config, name, None)
        if isinstance(value, int) and value <= 0:
            raise ModelUnsupported(f"{config.model_type} has {name} = {value}, expected a positive number")


def check_not_quantized(config: Any) -> None:
    """Raise ModelUnsupported if the weights of a model are quantized."""
    if (quantization := getattr(config, "quantization_config", None)) is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
    advice = "use the unquantized version of the model"
    if method == "mxfp4":
        advice = "convert them first, as docs/models.md shows"
    name = config.name_or_path or config.model_type
    raise ModelUnsupported(f"the weights of {name} are quantized ({method}), expected bfloat16 or float32: {advice}")


def find_head_problem(text_config: Any) -> str | None:
    """Return why neither the paged cache nor tree attention can hold the keys and values of a model, if so."""
    if getattr(text_config, "kv_lora_rank", None):
        return "latent keys and values (kv_lora_rank)"
    key_width, value_width = getattr(text_config, "head_dim", None), getattr(text_config, "v_head_dim", None)
    if None not in (key_width, value_width) and key_width != value_width:
        return f"values of width {value_width} and keys of width {key_width} (v_head_dim)"
    return None


def describe_pack_layout(config: Any) -> str:
    """Return the layout of a model and the reason, for a line at the start of a run."""
    text_config = config.get_text_config()
    layers = ", ".join(sorted(_get_layer_types(text_config) & SEQUENTIAL_LAYERS))
    if choose_pack_layout(config) is PackLayout.FOREST:
        forks = f"; the states of {layers} layers fork where it does" if layers else ""
        return f"forest: shared prefixes are computed once{forks}"
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


def check_attention_is_pluggable(config: Any) -> None:
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
            f"{config.model_type} does not support custom attention functions, which the engine and the trainer need"
        )


def _get_layer_types(text_config: Any) -> set[str]:
    names = ("layer_types", "layers_block_type", "block_types")
    return {layer_type for name in names for layer_type in getattr(text_config, name, None) or ()}
