"""Loading a causal language model so that its attention reads the paged cache.

The model keeps its own code. Attention is the one place where an engine must take part, and transformers has a door
for it: `paged_attention` is registered under a name, the model is loaded with that name, and what the engine passes to
`forward` arrives at the function untouched.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from ramify.errors import ModelUnsupported, WeightsRefused
from ramify.model.pack_layout import get_longrope_limit, get_per_layer_settings
from ramify.model.paged_attention import paged_attention
from ramify.model.precision import DtypeChoice, choose_dtype

ATTENTION_NAME = "ramify_paged"
UNIFORM_SETTINGS = {"num_attention_heads", "num_key_value_heads", "head_dim"}  # a pool has rows of one width


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes an engine needs to know."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: the Hugging Face module, where it is, and its sizes."""

    module: Any
    path: Path
    shape: ModelShape
    dtype_choice: DtypeChoice
    device: torch.device
    eos_ids: frozenset[int]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self.dtype_choice.dtype


def load_model(path: Path, *, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load the model directory `path`; `auto` takes a GPU if there is one, and a dtype as `choose_dtype` says."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    logging.disable_progress_bar()
    config = load_config(path)
    shape = _read_shape(config)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    choice = choose_dtype(dtype, getattr(config, "dtype", None), place)
    module = load_hf_model(path, config, choice.dtype, ATTENTION_NAME)
    module.eval().requires_grad_(False).to(place)
    return LoadedModel(module, path, shape, choice, place, _collect_eos_ids(config, module.generation_config))


def load_config(path: Path) -> Any:
    """The config of a model directory, as transformers understands it."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnsupported(f"transformers cannot read {path / 'config.json'}: {_first_line(error)}") from error


def load_hf_model(path: Path, config: Any, dtype: torch.dtype, attn_implementation: str | None) -> Any:
    """The model of a directory with all of its weights; what a file does not hold would be made up."""
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise WeightsRefused(f"the weights in {path} cannot be read: {_first_line(error)}") from error
    except KeyError as error:  # of a class for each attention function it knows
        raise ModelUnsupported(f"{config.model_type} computes attention by itself: it knows no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelUnsupported(f"transformers cannot load {path}: {_first_line(error)}") from error
    module, told = found
    if missing := sorted(told["missing_keys"]):
        raise WeightsRefused(f"{path} lacks {len(missing)} tensors of its model ({', '.join(missing[:3])})")
    return module


def _first_line(error: Exception) -> str:
    """The first line of it; transformers adds pages."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _read_shape(config: Any) -> ModelShape:
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelUnsupported(f"{config.model_type} has layers without paged attention: {', '.join(sorted(unknown))}")
    if getattr(text, "kv_lora_rank", None):
        raise ModelUnsupported(f"{config.model_type} caches latent keys, which the paged cache cannot hold yet")
    if own := sorted(get_per_layer_settings(text) & UNIFORM_SETTINGS):
        raise ModelUnsupported(
            f"{config.model_type} has layers that differ in {', '.join(own)}, which the paged cache cannot hold yet"
        )
    if silent := [name for name in ("num_attention_heads", "max_position_embeddings") if not hasattr(text, name)]:
        raise ModelUnsupported(f"{config.model_type} has a config without {', '.join(silent)}, which the engine reads")
    heads = text.num_attention_heads
    return ModelShape(
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        max_positions=min(text.max_position_embeddings, get_longrope_limit(text) or text.max_position_embeddings),
    )


def _collect_eos_ids(*configs: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in configs:
        eos = getattr(config, "eos_token_id", None)
        found.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(found)
