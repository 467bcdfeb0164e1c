"""Rough estimate of the memory that a run needs, and the check that it fits, before anything is loaded.

The estimate covers what dominates: weights and their copies, optimizer state, the activations of one pack, the KV cache
and the states of recurrent layers. An engine's second copy of the weights during an update is left out on a GPU: one
that has no room for it uses host memory. The estimate was compared with one measurement (Qwen3-0.6B, bf16, packs of 16k
tokens: 30 GiB), so it tells whether a run fits, no more.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.config import raise_config_invalid
from ramify.errors import ModelNotFound, WeightsRefused
from ramify.infer.config import EngineConfig, ExternalConfig, VLLMConfig
from ramify.launch.devices import DeviceAllocations
from ramify.launch.machine import get_usable_memory
from ramify.model.experts import describe_experts
from ramify.model.layer_types import RECURRENT_LAYER_TYPES
from ramify.model.manifest import read_tensor_shapes
from ramify.model.resolve import resolve_model_path
from ramify.orchestrate.config import RunConfig

GIB = 1 << 30
ASSUMED_GPU_BYTES = 80 * GIB  # memory of a GPU that is not on this machine
MAX_MEMORY_FRACTION = 0.95  # of a device
TORCH_BASE_BYTES = 1 << 30  # of a process with torch, without a model
PROCESS_BASE_BYTES = 150 << 20  # of a process without torch
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4  # per trained parameter
STATE_BYTES = 4  # per element of a recurrent layer's state
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
    kv_elements: int = 0
    """Elements of keys and values per token and layer."""
    state_elements: int = 0
    """Elements of the states of all recurrent layers, per request."""
    num_recurrent_layers: int = 0
    origin: str = "from its files"
    experts_note: str | None = None
    """What to know about a mixture of experts before it is trained."""

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
        except (ModelNotFound, WeightsRefused, OSError, ValueError):
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
        recurrent_layers = [name for name in hf_config.get("layer_types") or () if name in RECURRENT_LAYER_TYPES]
        return cls(
            num_parameters=sum(math.prod(shape) for shape in read_tensor_shapes(directory).values()),
            num_layers=hf_config.get("num_hidden_layers", 0),
            hidden_size=hidden_size,
            intermediate_size=hf_config.get("intermediate_size", 0),
            kv_elements=2 * head_dim * (hf_config.get("num_key_value_heads") or num_heads),
            state_elements=sum(_count_state_elements(name, hf_config) for name in recurrent_layers),
            num_recurrent_layers=len(recurrent_layers),
            experts_note=experts_note,
        )

    @classmethod
    def _from_parameter_count(cls, num_parameters: int) -> "ModelSize":
        """Guess typical dimensions: 12 hidden² parameters per layer, and a hidden size of 40 times the layers."""
        hidden_size = round((40 * num_parameters / 12) ** (1 / 3) / 128) * 128 or 128
        num_layers = max(1, hidden_size // 40)
        return cls(num_parameters, num_layers, hidden_size, 3 * hidden_size, 2 * 1024, origin=GUESSED_ORIGIN)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that the engines (the policy's and those of other models), the trainer and all other processes need."""

    inference: int
    trainer: int
    other: int


def estimate_memory(config: RunConfig, model: ModelSize, devices: DeviceAllocations) -> MemoryEstimate:
    """Estimate the memory of a run on the devices that are allocated for it."""
    gpus, num_sources = devices.inference.gpus, len(config.train) + len(config.eval)
    device_memory = (gpus[0].memory or ASSUMED_GPU_BYTES) if gpus else get_usable_memory()
    return MemoryEstimate(
        inference=sum(
            estimate_engine(engine, config.seq_len, size, gpu=bool(gpus), device_memory=device_memory)
            for engine, size in _list_engines(config, model)
        ),
        trainer=estimate_trainer(config, model, gpu=bool(devices.trainer.gpus), num_ranks=config.launch.trainer_gpus),
        other=PROCESS_BASE_BYTES * (2 + 2 * num_sources)
        + (_count_buffer_bytes(config, model, gpu=True) if devices.trainer.gpus else 0),  # its copy in pinned memory
    )


def check_memory(estimate: MemoryEstimate, devices: DeviceAllocations) -> None:
    """Raise ConfigInvalid if a GPU or the machine has too little memory."""
    engine_gpus, trainer_gpus = devices.inference.gpus, devices.trainer.gpus
    if devices.is_colocated:
        demands = [(gpu, estimate.inference + estimate.trainer) for gpu in engine_gpus[:1]]
    else:
        demands = [(gpu, estimate.inference) for gpu in engine_gpus] + [(gpu, estimate.trainer) for gpu in trainer_gpus]
    host_bytes = estimate.other + (0 if engine_gpus else estimate.inference) + (0 if trainer_gpus else estimate.trainer)
    rows = [(f"GPU {gpu.index}", needed, gpu.memory) for gpu, needed in demands]
    problems = [
        ("launch", f"not enough memory: {name} has {memory / GIB:.1f} GiB, the run needs about {needed / GIB:.1f} GiB")
        for name, needed, memory in [*rows, ("this machine", host_bytes, get_usable_memory())]
        if memory is not None and needed > MAX_MEMORY_FRACTION * memory
    ]
    if problems:
        raise_config_invalid(problems)


def _list_engines(config: RunConfig, model: ModelSize) -> list[tuple[EngineConfig | VLLMConfig, ModelSize]]:
    """Return the engines that the run starts, each with the size of its model if that is known."""
    engines = [] if isinstance(config.inference, ExternalConfig) else [(config.inference, model)]
    for other in config.all_models.values():
        if other.is_managed and (size := ModelSize.from_name(other.name)) is not None:
            engines.append((other.inference, size))
    return engines


def estimate_engine(
    inference: EngineConfig | VLLMConfig, seq_len: int, model: ModelSize, *, gpu: bool, device_memory: int
) -> int:
    """Estimate weights and a KV cache for the most running requests, limited by its fraction of the memory."""
    element_bytes = _get_element_bytes(inference.dtype, gpu)
    weight_bytes = TORCH_BASE_BYTES + model.num_parameters * element_bytes
    token_bytes = model.num_kv_layers * model.kv_elements * element_bytes
    max_len = inference.max_model_len or seq_len
    if isinstance(inference, VLLMConfig):
        vllm_bytes = int(inference.gpu_memory_utilization * device_memory) if gpu else 0
        return max(vllm_bytes, weight_bytes + max_len * token_bytes)
    state_bytes = (inference.max_running_requests + inference.num_state_snapshots) * model.state_elements * STATE_BYTES
    cache_limit = int(inference.kv_memory_fraction * device_memory) - state_bytes
    cache_tokens = inference.kv_cache_tokens or max_len * inference.max_running_requests
    return weight_bytes + state_bytes + max(max_len * token_bytes, min(cache_tokens * token_bytes, cache_limit))


def estimate_trainer(config: RunConfig, model: ModelSize, *, gpu: bool, num_ranks: int) -> int:
    """Estimate the memory of one rank: its share of the weights and of the optimizer's state, and activations."""
    trainer = config.trainer
    element_bytes = _get_element_bytes(trainer.dtype, gpu)
    num_trained = model.num_parameters * (LORA_PARAMETER_FRACTION if trainer.lora.enabled else 1)
    has_copy = element_bytes < MASTER_BYTES or trainer.lora.enabled  # of the weights, beside the master weights
    state_bytes = model.num_parameters * element_bytes if has_copy else 0
    state_bytes += int(num_trained * (MASTER_BYTES + MOMENT_BYTES + GRADIENT_BYTES))
    layer_elements = 8 * model.hidden_size + 4 * model.intermediate_size  # that the backward pass needs per token
    saved_elements = model.num_layers * layer_elements
    if trainer.activation_checkpointing:
        saved_elements = model.num_layers * model.hidden_size + layer_elements
    state_bytes = state_bytes // num_ranks + _count_buffer_bytes(config, model, gpu=gpu)
    return TORCH_BASE_BYTES + state_bytes + trainer.pack_tokens * saved_elements * element_bytes


def _count_buffer_bytes(config: RunConfig, model: ModelSize, *, gpu: bool) -> int:
    """Return the bytes of the buffer from which engines copy the weights; 0 unless `weights.transport` is `ipc`."""
    element_bytes = _get_element_bytes(config.trainer.dtype, gpu)
    return model.num_parameters * element_bytes if config.weights.transport == "ipc" else 0


def _count_state_elements(layer_type: str, hf_config: dict[str, Any]) -> int:
    """Return the elements of the state of one recurrent layer."""
    if layer_type == "conv":
        return hf_config.get("hidden_size", 0) * hf_config.get("conv_L_cache", 0)
    num_keys, key_dim = hf_config.get("linear_num_key_heads", 0), hf_config.get("linear_key_head_dim", 0)
    num_values, value_dim = hf_config.get("linear_num_value_heads", 0), hf_config.get("linear_value_head_dim", 0)
    conv_elements = (2 * num_keys * key_dim + num_values * value_dim) * hf_config.get("linear_conv_kernel_dim", 0)
    return conv_elements + num_values * key_dim * value_dim


def _get_element_bytes(dtype: str, gpu: bool) -> int:
    return 4 if dtype == "float32" or (dtype == "auto" and not gpu) else 2
