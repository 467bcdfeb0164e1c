"""The size of a model, and a rough estimate of the memory that a trainer of it needs. Needs no torch.

The memory covers what dominates: weights and their copies, optimizer state, and the activations of one pack. The
estimate was compared with one measurement (Qwen3-0.6B, bf16, packs of 16k tokens: 30 GiB), so it tells whether a run
fits, no more.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.core.errors import ModelNotFound, WeightsRefused
from ramify.model.experts import OUTER_MATRIX_NAMES, RECURRENT_LAYER_TYPES, describe_experts
from ramify.model.resolve import resolve_model_path
from ramify.model.weights_manifest import read_tensor_shapes
from ramify.train.config import TrainerConfig

TORCH_BASE_BYTES = 1 << 30  # of a process with torch, without a model
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4  # per trained parameter
QUANTIZED_MOMENT_BYTES = 2.0625  # in 8 bits, with their scales
MUON_MOMENT_BYTES = 4
MAX_MEMORY_FRACTION = 0.95  # of a device that may be used; estimates include the rest
LORA_PARAMETER_FRACTION = 0.02  # parameters of adapters, relative to the model
GUESSED_ORIGIN = "guessed from its name"
SIZE_IN_NAME = re.compile(r"(\d+(?:\.\d+)?)([BM])(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The dimensions of a model that determine its memory."""

    num_parameters: int
    num_layers: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    kv_elements: int = 0  # elements of keys and values per token and layer
    state_elements: int = 0  # elements of the states of all recurrent layers, per request
    num_recurrent_layers: int = 0
    num_outer_parameters: int = 0  # parameters of embeddings and head, whose moments are always float32
    origin: str = "from its files"
    experts_note: str | None = None  # what to know about a mixture of experts before it is trained

    @property
    def num_kv_layers(self) -> int:
        """The number of layers with keys and values."""
        return self.num_layers - self.num_recurrent_layers

    @property
    def is_guessed(self) -> bool:
        """Whether the dimensions are guessed from the model's name."""
        return self.origin == GUESSED_ORIGIN

    @classmethod
    def from_name(cls, name: str) -> "ModelSize | None":
        """Read the size of a model from its files or, if it is not here, guess it from its name; None if neither."""
        try:
            return cls._from_files(resolve_model_path(name))
        except (ModelNotFound, WeightsRefused, OSError, ValueError, ArithmeticError, RecursionError):
            match = SIZE_IN_NAME.search(name.rsplit("/", 1)[-1])
        if match is None:
            return None
        scale = {"B": 10**9, "M": 10**6}[match[2].upper()]
        return cls._from_parameter_count(int(float(match[1]) * scale))

    @classmethod
    def _from_files(cls, directory: Path) -> "ModelSize":
        hf_config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        experts_note, hf_config = describe_experts(hf_config), hf_config.get("text_config") or hf_config
        hidden_size, num_heads = hf_config.get("hidden_size", 0), hf_config.get("num_attention_heads", 1)
        head_dim = hf_config.get("head_dim") or hidden_size // num_heads
        shapes = read_tensor_shapes(directory)
        if not shapes:
            raise WeightsRefused(f"{directory} has no weights")
        recurrent_layers = [name for name in hf_config.get("layer_types") or () if name in RECURRENT_LAYER_TYPES]
        return cls(
            num_parameters=sum(math.prod(shape) for shape in shapes.values()),
            num_layers=hf_config.get("num_hidden_layers", 0),
            hidden_size=hidden_size,
            intermediate_size=hf_config.get("intermediate_size", 0),
            kv_elements=2 * head_dim * (hf_config.get("num_key_value_heads") or num_heads),
            state_elements=sum(_count_state_elements(name, hf_config) for name in recurrent_layers),
            num_recurrent_layers=len(recurrent_layers),
            num_outer_parameters=sum(
                math.prod(shape) for name, shape in shapes.items() if any(part in name for part in OUTER_MATRIX_NAMES)
            ),
            experts_note=experts_note,
        )

    @classmethod
    def _from_parameter_count(cls, num_parameters: int) -> "ModelSize":
        """Guess typical dimensions: 12 hidden² parameters per layer, and a hidden size of 40 times the layers."""
        hidden_size = round((40 * num_parameters / 12) ** (1 / 3) / 128) * 128 or 128
        num_layers = max(1, hidden_size // 40)
        sizes = (num_layers, hidden_size, 3 * hidden_size, 2 * 1024)
        return cls(num_parameters, *sizes, num_outer_parameters=num_parameters // 8, origin=GUESSED_ORIGIN)


def _count_state_elements(layer_type: str, hf_config: dict[str, Any]) -> int:
    """Return the elements of the state of one recurrent layer."""
    if layer_type == "conv":
        return hf_config.get("hidden_size", 0) * hf_config.get("conv_L_cache", 0)
    num_keys, key_dim = hf_config.get("linear_num_key_heads", 0), hf_config.get("linear_key_head_dim", 0)
    num_values, value_dim = hf_config.get("linear_num_value_heads", 0), hf_config.get("linear_value_head_dim", 0)
    conv_elements = (2 * num_keys * key_dim + num_values * value_dim) * hf_config.get("linear_conv_kernel_dim", 0)
    return conv_elements + num_values * key_dim * value_dim


def estimate_rank(
    trainer: TrainerConfig, model: ModelSize, *, gpu: bool, num_ranks: int = 1, copy_bytes: int = 0
) -> int:
    """Estimate the memory of one rank: its share of the weights and of the optimizer's state, and activations.

    `copy_bytes` are for a copy of the published weights.
    """
    element_bytes = get_element_bytes(trainer.dtype, gpu)
    num_trained = count_trained(trainer, model)
    # With FSDP, and for adapters, the model's weights are not a part of the master weights.
    has_copy = (element_bytes < MASTER_BYTES and num_ranks > 1) or trainer.lora.enabled
    state_bytes = model.num_parameters * element_bytes if has_copy else 0
    state_bytes += int(num_trained * (MASTER_BYTES + GRADIENT_BYTES)) + count_moment_bytes(trainer, model)
    layer_elements = 8 * model.hidden_size + 4 * model.intermediate_size  # that the backward pass needs per token
    num_recomputed = min(trainer.num_recomputed_layers, model.num_layers)
    saved_elements = (model.num_layers - num_recomputed) * layer_elements
    if num_recomputed:
        saved_elements += num_recomputed * model.hidden_size + layer_elements
    state_bytes = state_bytes // num_ranks + copy_bytes
    return add_margin(TORCH_BASE_BYTES + state_bytes + trainer.max_pack_tokens * saved_elements * element_bytes)


def count_trained(trainer: TrainerConfig, model: ModelSize) -> float:
    """Return the number of parameters that are trained."""
    return model.num_parameters * (LORA_PARAMETER_FRACTION if trainer.lora.enabled else 1)


def count_moment_bytes(trainer: TrainerConfig, model: ModelSize) -> int:
    """Return the bytes of the optimizer's moments; `auto` counts as float32. Embeddings and head have AdamW's."""
    optim = trainer.optim
    inner_bytes = {"8bit": QUANTIZED_MOMENT_BYTES}.get(optim.moments, MOMENT_BYTES)
    inner_bytes = MUON_MOMENT_BYTES if optim.type == "muon" else inner_bytes
    num_outer = 0 if trainer.lora.enabled else model.num_outer_parameters
    return int(num_outer * MOMENT_BYTES + (count_trained(trainer, model) - num_outer) * inner_bytes)


def count_weight_bytes(trainer: TrainerConfig, model: ModelSize, *, gpu: bool) -> int:
    """Return the bytes of one published version of the weights."""
    return model.num_parameters * get_element_bytes(trainer.dtype, gpu)


def get_element_bytes(dtype: str, gpu: bool) -> int:
    """Return the bytes of one weight of a process with the setting `dtype`; `auto` is float32 on a CPU."""
    return 4 if dtype == "float32" or (dtype == "auto" and not gpu) else 2


def add_margin(num_bytes: int) -> int:
    """Return how much of a device is needed for these bytes, with the part that stays free."""
    return int(num_bytes / MAX_MEMORY_FRACTION)
