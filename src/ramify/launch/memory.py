"""Rough estimate of the memory that a run needs, and the check that it fits, before anything is loaded.

A run that does not fit is refused with settings that would: the same estimate is made with changed settings.

The estimate covers what dominates: weights and their copies, optimizer state, the activations of one pack, the KV cache
and the states of recurrent layers. An engine's second copy of the weights during an update is left out on a GPU: one
that has no room for it uses host memory. The estimate was compared with one measurement (Qwen3-0.6B, bf16, packs of 16k
tokens: 30 GiB), so it tells whether a run fits, no more.
"""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ramify.core.config import Config
from ramify.core.errors import ConfigInvalid, ModelNotFound, WeightsRefused
from ramify.infer.config import EngineConfig, ExternalConfig, VLLMConfig
from ramify.launch.devices import GIB, DeviceAllocation, DeviceAllocations
from ramify.launch.machine import get_usable_memory
from ramify.model.experts import OUTER_MATRIX_NAMES, RECURRENT_LAYER_TYPES, describe_experts
from ramify.model.image_support import find_rank_problem
from ramify.model.manifest import read_tensor_shapes
from ramify.model.resolve import resolve_model_path
from ramify.orchestrate.config import RunConfig
from ramify.train.checkpoint_manifest import CHECKPOINTS_DIR, find_saved_moments

ASSUMED_GPU_BYTES = 80 * GIB  # memory of a GPU of unknown size
MAX_MEMORY_FRACTION = 0.95  # of a device
TORCH_BASE_BYTES = 1 << 30  # of a process with torch, without a model
PROCESS_BASE_BYTES = 150 << 20  # of a process without torch
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4  # per trained parameter
QUANTIZED_MOMENT_BYTES = 2.0625  # in 8 bits, with their scales
STATE_BYTES = 4  # per element of a recurrent layer's state
LORA_PARAMETER_FRACTION = 0.02  # parameters of adapters, relative to the model
GUESSED_ORIGIN = "guessed from its name"
TRIED_RANKS = (1, 2, 4, 8)  # of the trainer, when a plan that does not fit looks for one that does
SMALL_PACK_TOKENS = 4096
SMALL_CACHE_FRACTION = 0.1  # of the GPU's memory, for the KV cache (native) or the engine (vLLM)
SIZE_IN_NAME = re.compile(r"(\d+(?:\.\d+)?)([BM])(?![a-z])", re.IGNORECASE)

ConfigT = TypeVar("ConfigT", bound=Config)
Settings = dict[str, Any]  # values by dotted key


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
    num_outer_parameters: int = 0
    """Parameters of embeddings and head, whose moments are always float32."""
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


def decide_moments(config: RunConfig, model: ModelSize, devices: DeviceAllocations) -> RunConfig:
    """Return the configuration with the format of AdamW's moments, if that is `auto` and the trainer has a GPU.

    A run with checkpoints continues in their format. Otherwise it is float32 unless only 8 bits fit.
    """
    optim, num_gpus = config.trainer.optim, len(devices.trainer.gpus)
    if optim.moments != "auto" or optim.type != "adamw" or num_gpus == 0:
        return config
    moments = find_saved_moments((config.shared_path or config.path) / CHECKPOINTS_DIR)
    key = ["trainer", "optim", "moments"]
    if moments is None and num_gpus == 1 and _find_shortages(config, model, devices):
        moments = None if _find_shortages(_with_value(config, key, "8bit"), model, devices) else "8bit"
    return _with_value(config, key, moments or "float32")


def check_memory(config: RunConfig, model: ModelSize, devices: DeviceAllocations) -> None:
    """Raise ConfigInvalid if a GPU or the machine has too little memory, with settings that would fit."""
    if problems := _find_shortages(config, model, devices):
        advice = _format_fitting_settings(config, model, devices)
        raise ConfigInvalid(
            problems=[*(("launch", problem) for problem in problems[:-1]), ("launch", problems[-1] + advice)]
        )


def find_long_path_warning(config: RunConfig, model: ModelSize, devices: DeviceAllocations) -> str | None:
    """Return which device is too small for a path of `seq_len` tokens, which is never split; None if none is.

    Such a run is not refused, because its paths may all be shorter.
    """
    if config.seq_len <= config.trainer.pack_tokens:
        return None
    shortages = _find_shortages(_with_value(config, ["trainer", "pack_tokens"], config.seq_len), model, devices)
    if not shortages:
        return None
    advice = "set a smaller seq_len, or trainer.activation_checkpointing = true"
    return f"a path of seq_len = {config.seq_len} tokens, trained in one piece, may not fit: {shortages[0]}; {advice}"


def _find_shortages(config: RunConfig, model: ModelSize, devices: DeviceAllocations) -> list[str]:
    """Return a problem for each GPU that has too little memory, and for this machine if it has too little."""
    estimate, engine_gpus, trainer_gpus = estimate_memory(config, model, devices), *devices.gpus_by_role
    if devices.is_colocated:
        demands = [(gpu, estimate.inference + estimate.trainer) for gpu in engine_gpus[:1]]
    else:
        demands = [(gpu, estimate.inference) for gpu in engine_gpus] + [(gpu, estimate.trainer) for gpu in trainer_gpus]
    host_bytes = estimate.other + (0 if engine_gpus else estimate.inference) + (0 if trainer_gpus else estimate.trainer)
    rows = [(gpu.label, needed, gpu.memory) for gpu, needed in demands]
    if not devices.is_assumed:
        rows.append(("this machine", host_bytes, get_usable_memory()))
    return [
        f"not enough memory: {name} has {memory / GIB:.1f} GiB, the run needs about {needed / GIB:.1f} GiB of it"
        for name, needed, memory in rows
        if memory is not None and needed > MAX_MEMORY_FRACTION * memory
    ]


def _format_fitting_settings(config: RunConfig, model: ModelSize, devices: DeviceAllocations) -> str:
    """Return the flags with which the run would fit: on the same devices, with LoRA, and on more GPUs."""
    options = [_find_fitting_settings(config, model, devices, {})]
    if not config.trainer.lora.enabled:
        options.append(_find_fitting_settings(config, model, devices, {"trainer.lora.enabled": True}))
    options.append(_find_fitting_gpus(config, model, devices))
    alternatives = [" ".join(_format_flag(key, value) for key, value in option.items()) for option in options if option]
    if options[-1] and not devices.is_assumed:
        num_gpus = options[-1].get("launch.trainer_gpus", 1) + int(bool(devices.inference.gpus))
        alternatives[-1] += f" on {num_gpus} GPUs"
    if not alternatives:
        alternatives = ["a smaller model", "`--cluster ray` and vLLM engines of several GPUs (cluster.engines.gpus)"]
    if devices.is_assumed:
        alternatives.append("larger GPUs (--cluster.node.gpu_memory_gib is their size)")
    elif not devices.trainer.gpus and config.trainer.device == "auto":
        flags = "--dry-run --cluster.node.gpus N --cluster.node.gpu_memory_gib M"
        alternatives.append(f"GPUs (this plan is for the CPU; `{flags}` plans for N GPUs of M GiB)")
    return f"; it would fit with {', or with '.join(alternatives)}"


def _find_fitting_gpus(config: RunConfig, model: ModelSize, devices: DeviceAllocations) -> Settings | None:
    """Return settings with which the run fits on more GPUs of the same size; None if it does not on a few."""
    if not devices.trainer.gpus:
        return None
    gpu, has_engine = devices.trainer.gpus[0], bool(devices.inference.gpus)
    num_tried = 0 if devices.is_colocated else len(devices.trainer.gpus)
    for num_ranks in (number for number in TRIED_RANKS if number > num_tried):
        if num_ranks > 1 and find_rank_problem(config.model.name, num_ranks):
            continue
        gpus = [dataclasses.replace(gpu, index=str(index)) for index in range(num_ranks + 1)]
        num_gpus = num_ranks + int(has_engine)
        settings: Settings = {"launch.gpu_placement": "split"} if has_engine else {}
        settings |= {"launch.trainer_gpus": num_ranks} if num_ranks > 1 else {}
        settings |= {"weights.transport": "disk"} if config.weights.transport == "ipc" else {}
        if devices.is_assumed and config.cluster.node.gpus < num_gpus:
            settings["cluster.node.gpus"] = num_gpus
        more = dataclasses.replace(
            devices,
            inference=DeviceAllocation(devices.inference.threads, gpus[:1] if has_engine else []),
            trainer=DeviceAllocation(devices.trainer.threads, gpus[1:]),
        )
        if fitting := _find_fitting_settings(config, model, more, settings):
            return fitting
    return None


def _find_fitting_settings(
    config: RunConfig, model: ModelSize, devices: DeviceAllocations, settings: Settings
) -> Settings | None:
    """Return the settings, and as few others as it takes, with which the run fits on the devices; None if none do."""

    def fits(settings: Settings) -> bool:
        changed = config
        for key, value in settings.items():
            changed = _with_value(changed, key.split("."), value)
        return not _find_shortages(changed, model, devices)

    savings = _list_savings(config)
    fitting = {**settings, **savings}
    if not fits(fitting):
        return None
    for key in savings:
        fewer = {other: value for other, value in fitting.items() if other != key}
        fitting = fewer if fits(fewer) else fitting
    return fitting


def _list_savings(config: RunConfig) -> Settings:
    """Return settings that take less memory than the run's own; the last one costs the least speed."""
    engine_key = {"native": "kv_memory_fraction", "vllm": "gpu_memory_utilization"}.get(config.inference.engine)
    savings: Settings = {}
    if engine_key and getattr(config.inference, engine_key) > SMALL_CACHE_FRACTION:
        savings[f"inference.{engine_key}"] = SMALL_CACHE_FRACTION
    optim = config.trainer.optim
    if optim.type == "adamw" and optim.moments != "8bit" and config.launch.trainer_gpus == 1:
        savings["trainer.optim.moments"] = "8bit"
    if not config.trainer.activation_checkpointing:
        savings["trainer.activation_checkpointing"] = True
    if config.trainer.pack_tokens > SMALL_PACK_TOKENS:
        savings["trainer.pack_tokens"] = SMALL_PACK_TOKENS
    return savings


def _format_flag(key: str, value: Any) -> str:
    return f"--{key} {value if isinstance(value, str) else json.dumps(value)}"


def _with_value(section: ConfigT, path: Sequence[str], value: Any) -> ConfigT:
    """Return a copy of the section with another value of the key at `path`."""
    name, *rest = path
    return section.model_copy(update={name: _with_value(getattr(section, name), rest, value) if rest else value})


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
    element_bytes = get_element_bytes(inference.dtype, gpu)
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
    element_bytes = get_element_bytes(trainer.dtype, gpu)
    num_trained = model.num_parameters * (LORA_PARAMETER_FRACTION if trainer.lora.enabled else 1)
    # With FSDP, and for adapters, the model's weights are not a part of the master weights.
    has_copy = (element_bytes < MASTER_BYTES and num_ranks > 1) or trainer.lora.enabled
    state_bytes = model.num_parameters * element_bytes if has_copy else 0
    state_bytes += int(num_trained * (MASTER_BYTES + GRADIENT_BYTES)) + _count_moment_bytes(config, model, num_trained)
    layer_elements = 8 * model.hidden_size + 4 * model.intermediate_size  # that the backward pass needs per token
    saved_elements = model.num_layers * layer_elements
    if trainer.activation_checkpointing:
        saved_elements = model.num_layers * model.hidden_size + layer_elements
    state_bytes = state_bytes // num_ranks + _count_buffer_bytes(config, model, gpu=gpu)
    return TORCH_BASE_BYTES + state_bytes + trainer.pack_tokens * saved_elements * element_bytes


def _count_moment_bytes(config: RunConfig, model: ModelSize, num_trained: float) -> int:
    """Return the bytes of AdamW's moments; `auto` counts as float32."""
    if config.trainer.optim.moments != "8bit":
        return int(num_trained * MOMENT_BYTES)
    num_float32 = 0 if config.trainer.lora.enabled else model.num_outer_parameters
    return int(num_float32 * MOMENT_BYTES + (num_trained - num_float32) * QUANTIZED_MOMENT_BYTES)


def _count_buffer_bytes(config: RunConfig, model: ModelSize, *, gpu: bool) -> int:
    """Return the bytes of the buffer from which engines copy the weights; 0 unless `weights.transport` is `ipc`."""
    element_bytes = get_element_bytes(config.trainer.dtype, gpu)
    return model.num_parameters * element_bytes if config.weights.transport == "ipc" else 0


def _count_state_elements(layer_type: str, hf_config: dict[str, Any]) -> int:
    """Return the elements of the state of one recurrent layer."""
    if layer_type == "conv":
        return hf_config.get("hidden_size", 0) * hf_config.get("conv_L_cache", 0)
    num_keys, key_dim = hf_config.get("linear_num_key_heads", 0), hf_config.get("linear_key_head_dim", 0)
    num_values, value_dim = hf_config.get("linear_num_value_heads", 0), hf_config.get("linear_value_head_dim", 0)
    conv_elements = (2 * num_keys * key_dim + num_values * value_dim) * hf_config.get("linear_conv_kernel_dim", 0)
    return conv_elements + num_values * key_dim * value_dim


def get_element_bytes(dtype: str, gpu: bool) -> int:
    """Return the bytes of one weight of a process with the setting `dtype`; `auto` is float32 on a CPU."""
    return 4 if dtype == "float32" or (dtype == "auto" and not gpu) else 2
