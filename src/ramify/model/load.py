"""Loading a causal language model so that its attention reads the paged cache.

The model keeps its own code. Only attention has to be replaced, and transformers supports that: `paged_attention` is
registered under a name, the model is loaded with that name, and what the engine passes to `forward` reaches the
function unchanged.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers import __version__ as transformers_version
from transformers.modeling_utils import load_state_dict
from transformers.utils import logging

from ramify.core.errors import ModelUnsupported, WeightsRefused
from ramify.core.terminal import hide_log_records
from ramify.model.experts import ATTENTION_LAYER_TYPES, RECURRENT_LAYER_TYPES
from ramify.model.kernels.paged_attention import paged_attention
from ramify.model.kernels.state_pool import StateSpec
from ramify.model.logprob_check import collect_token_ids, describe_error, split_attn_implementation
from ramify.model.lora import merge_published_adapters
from ramify.model.pack_layout import (
    UNSUPPORTED_BY_ENGINE,
    VISION_MODEL_TYPES,
    check_attention_is_pluggable,
    check_is_decoder,
    check_not_quantized,
    check_sizes,
    find_head_problem,
    get_longrope_limit,
    get_per_layer_settings,
)
from ramify.model.precision import DtypeChoice, choose_dtype
from ramify.model.recurrent_state import probe_state_specs
from ramify.model.vision import VisionTower, get_vision_tower
from ramify.model.weights import read_tensors
from ramify.model.weights_manifest import PublishedAdapters

ATTENTION_NAME = "ramify_paged"
# About the default config of Idefics3, which transformers compares each config to: its vocabulary and its padding.
IDEFICS3_DEFAULT_WARNING = "(between 0 and 31999), got 128002"
ENGINE_UNIFORM_SETTINGS = {"num_attention_heads", "num_key_value_heads", "head_dim"}  # one value for all layers


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that an engine needs. `max_positions` is the longest sequence.

    `kv_layers` are the layers with attention; the others are recurrent.
    """

    num_layers: int
    kv_layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run: the Hugging Face module, its sizes, dtype, device and EOS tokens.

    `tower` encodes images; a text model has none. `state_specs` are the states of recurrent layers, if it has such
    layers.
    """

    module: Any
    shape: ModelShape
    dtype_choice: DtypeChoice
    device: torch.device
    eos_ids: frozenset[int]
    tower: VisionTower | None = None
    state_specs: tuple[StateSpec, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self.dtype_choice.dtype


def load_engine_model(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    add_adapters: Callable[[Any, torch.device], None] | None = None,
) -> LoadedModel:
    """Load the model directory `path`.

    Device `auto` is a GPU if there is one; dtype `auto` is what `choose_dtype` returns. If `add_adapters` is given, it
    is called with the model, before it moves to its device, and the device. The model then gets versions of the weights
    that hold only adapters.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    config = load_config(path)
    shape = read_shape(config)
    torch_device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    stored_dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    dtype_choice = choose_dtype(dtype, stored_dtype, torch_device)
    module = load_hf_model(path, config, dtype_choice.dtype, ATTENTION_NAME)
    module.eval().requires_grad_(False)
    if add_adapters is not None:
        add_adapters(module, torch_device)
    module.to(torch_device)
    eos_ids = collect_token_ids((module.config, module.generation_config), ["eos_token_id"])
    tower, is_hybrid = get_vision_tower(module), len(shape.kv_layers) < shape.num_layers
    state_specs = probe_state_specs(module, ATTENTION_NAME) if is_hybrid else ()
    return LoadedModel(module, shape, dtype_choice, torch_device, eos_ids, tower, state_specs)


def load_config(path: Path) -> Any:
    """Load the Hugging Face config of a model directory, without code that comes with it. Raises ModelUnsupported."""
    try:
        with hide_log_records("transformers.configuration_utils", IDEFICS3_DEFAULT_WARNING):
            settings, _ = PreTrainedConfig.get_config_dict(path, local_files_only=True)
            _check_family(path, settings.get("model_type"))
            # `None`, the default, asks on standard input whether to run that code
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except ModelUnsupported:
        raise
    except Exception as error:  # wrong values of a config raise anything
        raise ModelUnsupported(f"transformers cannot read {path / 'config.json'}: {describe_error(error)}") from error
    return config


def _check_family(path: Path, model_type: str | None) -> None:
    if model_type is None:
        raise ModelUnsupported(f"{path / 'config.json'} has no model_type; expected the name of a model family")
    if model_type not in CONFIG_MAPPING:
        raise ModelUnsupported(
            f"the model in {path} is of the family {model_type!r}, which transformers {transformers_version} does not "
            "have, and Ramify never runs code that comes with a model: use a model of a family in docs/models.md, or a "
            "version of transformers that has this one"
        )


def load_hf_model(
    path: Path, config: Any, dtype: torch.dtype, attn_implementation: str | None, *, keep_precision: bool = False
) -> Any:
    """Load the Hugging Face model of a directory. Raises WeightsRefused or ModelUnsupported.

    A missing tensor is an error: transformers would initialize it with random numbers. Quantized weights are refused.
    Published adapters are merged into their base model. With `keep_precision`, tensors whose values `dtype` would round
    keep their stored dtype; on the host they stay in their mapped files.
    """
    check_not_quantized(config)
    if PublishedAdapters.from_directory(path) is not None:
        manifest, tensors = read_tensors(path)
        assert manifest.adapters is not None
        base_model = manifest.adapters.base_model
        module = load_hf_model(base_model, config, dtype, attn_implementation, keep_precision=keep_precision)
        merge_published_adapters(module, tensors, manifest.adapters)
        return module
    logging.disable_progress_bar()
    is_vision_model = config.model_type in VISION_MODEL_TYPES
    auto_class: Any = AutoModelForImageTextToText if is_vision_model else AutoModelForCausalLM
    checkpoint = _map_checkpoint(path) if keep_precision else None
    try:
        settings: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}  # see `load_config`
        settings["attn_implementation"] = split_attn_implementation(config, attn_implementation)
        if keep_precision:
            with torch.device("meta"):
                empty = auto_class.from_config(config, **settings)
            auto_class, config, settings["state_dict"] = type(empty), empty.config, checkpoint
        loaded: Any = auto_class.from_pretrained(
            None if keep_precision else path,
            config=config,
            local_files_only=True,
            output_loading_info=True,
            **settings,
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise WeightsRefused(f"the weights in {path} cannot be read: {describe_error(error)}") from error
    except KeyError as error:  # of a model with a class for each attention implementation
        raise ModelUnsupported(
            f"{config.model_type} does not support custom attention functions: it knows no {error}"
        ) from error
    except Exception as error:  # wrong values of its config raise anything
        raise ModelUnsupported(f"transformers cannot load {path}: {describe_error(error)}") from error
    module, loading_info = loaded
    if missing := sorted(loading_info["missing_keys"]):
        raise WeightsRefused(f"{path} lacks {len(missing)} tensors of its model ({', '.join(missing[:3])})")
    return module


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor in a mapped file. transformers reads it when it needs it: by `tensor[...].to(...)`."""

    tensor: Tensor

    def __getitem__(self, index: Any) -> "_StoredTensor":
        """Return this: `to` needs the dtype."""
        return self

    def to(self, *, device: Any, dtype: torch.dtype) -> Tensor:
        """Return the tensor in `dtype`, or as it is stored if `dtype` would round it."""
        is_rounded = torch.promote_types(self.tensor.dtype, dtype) != dtype
        return self.tensor.to(device=device, dtype=None if is_rounded else dtype)


def _map_checkpoint(path: Path) -> dict[str, _StoredTensor]:
    """Map the tensors of a model directory, by name, from the files that transformers would read.

    Raises WeightsRefused.
    """
    try:
        return {
            key: _StoredTensor(value)
            for file in _list_weight_files(path)
            for key, value in load_state_dict(path / file).items()
        }
    except Exception as error:  # damaged files raise anything
        raise WeightsRefused(f"the weights in {path} cannot be read: {describe_error(error)}") from error


def _list_weight_files(path: Path) -> list[str]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{name}.index.json"
        if (path / name).is_file():
            return [name]
        if index.is_file():
            return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    raise OSError("there is neither model.safetensors nor an index of several files")


def read_shape(config: Any) -> ModelShape:
    """Return the sizes of a model by its config. Raises ModelUnsupported, by name, for what the engine cannot run."""
    text_config, model_type = config.get_text_config(), config.model_type
    check_is_decoder(config)
    check_sizes(config)
    if problem := UNSUPPORTED_BY_ENGINE.get(text_config.model_type):
        raise ModelUnsupported(f"{model_type} has {problem}")
    _require_settings(config, "num_hidden_layers")
    layer_types = getattr(text_config, "layer_types", None) or ["full_attention"] * text_config.num_hidden_layers
    if unknown := sorted(set(layer_types) - ATTENTION_LAYER_TYPES - RECURRENT_LAYER_TYPES):
        raise ModelUnsupported(f"{model_type} has layers that the engine does not know: {', '.join(unknown)}")
    kv_layers = tuple(index for index, layer_type in enumerate(layer_types) if layer_type in ATTENTION_LAYER_TYPES)
    if not kv_layers:
        raise ModelUnsupported(f"{model_type} has no layers with attention, which the engine needs")
    if varying := sorted(get_per_layer_settings(text_config) & ENGINE_UNIFORM_SETTINGS):
        raise ModelUnsupported(
            f"{model_type} has layers that differ in {', '.join(varying)}, which the paged cache cannot hold yet"
        )
    if problem := find_head_problem(text_config):
        raise ModelUnsupported(f"{model_type} has {problem}, which the paged cache cannot hold")
    _require_settings(config, "num_attention_heads", "max_position_embeddings")
    if len(kv_layers) == len(layer_types):  # transformers checks models without recurrent layers only
        check_attention_is_pluggable(config)
    check_not_quantized(config)  # last: other weights would not change the other reasons
    heads, max_positions = text_config.num_attention_heads, text_config.max_position_embeddings
    return ModelShape(
        num_layers=text_config.num_hidden_layers,
        kv_layers=kv_layers,
        num_kv_heads=getattr(text_config, "num_key_value_heads", None) or heads,
        head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
        vocab_size=text_config.vocab_size,
        max_positions=min(max_positions, get_longrope_limit(text_config) or max_positions),
    )


def _require_settings(config: Any, *names: str) -> None:
    if missing := [name for name in names if not hasattr(config.get_text_config(), name)]:
        raise ModelUnsupported(f"{config.model_type} has a config without {', '.join(missing)}, which the engine needs")
