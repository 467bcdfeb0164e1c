"""Rough estimates of the memory and the disk space that a run needs, before anything is loaded.

The memory covers what dominates: weights and their copies, optimizer state, the activations of one pack, the KV cache
and the states of recurrent layers. An engine's second copy of the weights during an update is left out on a GPU: one
that has no room for it uses host memory. The estimate was compared with one measurement (Qwen3-0.6B, bf16, packs of 16k
tokens: 30 GiB), so it tells whether a run fits, no more.

On the disk, a new checkpoint is complete before an old one is removed. So a run that saves more than once needs room
for two, and for one more than `checkpoint.keep_last` to keep all of them.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.core.errors import ModelNotFound, WeightsRefused
from ramify.core.files import get_free_bytes
from ramify.core.names import format_count
from ramify.core.watchdog import watch_storage
from ramify.infer.config import EngineConfig, VLLMConfig
from ramify.launch.launcher import ClusterNode
from ramify.launch.machine import GIB, uses_gpu
from ramify.model.experts import OUTER_MATRIX_NAMES, RECURRENT_LAYER_TYPES, describe_experts
from ramify.model.resolve import resolve_model_path
from ramify.model.weights_manifest import read_tensor_shapes
from ramify.orchestrate.run_config import RunConfig
from ramify.train.checkpoint_manifest import CHECKPOINTS_DIR
from ramify.train.weights_directory import WEIGHTS_DIR

TORCH_BASE_BYTES = 1 << 30  # of a process with torch, without a model
PROCESS_BASE_BYTES = 150 << 20  # of a process without torch
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4  # per trained parameter
QUANTIZED_MOMENT_BYTES = 2.0625  # in 8 bits, with their scales
MUON_MOMENT_BYTES = 4
MAX_MEMORY_FRACTION = 0.95  # of a device that may be used; estimates include the rest
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


def estimate_engine(
    inference: EngineConfig | VLLMConfig, seq_len: int, model: ModelSize, *, num_gpus: int, device_memory: int
) -> int:
    """Estimate weights and a KV cache for the most running requests, limited by its fraction of the memory.

    The result is for each of its GPUs or, if it has none, for the memory of its node.
    """
    element_bytes = get_element_bytes(inference.dtype, num_gpus > 0)
    weight_bytes = TORCH_BASE_BYTES + model.num_parameters * element_bytes // max(1, num_gpus)
    token_bytes = model.num_kv_layers * model.kv_elements * element_bytes // max(1, num_gpus)
    max_len = inference.max_model_len or seq_len
    if isinstance(inference, VLLMConfig):
        vllm_bytes = int(inference.gpu_memory_utilization * device_memory) if num_gpus else 0
        return max(vllm_bytes, _add_margin(weight_bytes + max_len * token_bytes))
    state_bytes = (inference.max_running_requests + inference.num_state_snapshots) * model.state_elements * STATE_BYTES
    cache_limit = int(inference.kv_memory_fraction * device_memory) - state_bytes
    cache_tokens = inference.kv_cache_tokens or max_len * inference.max_running_requests
    cache_bytes = max(max_len * token_bytes, min(cache_tokens * token_bytes, cache_limit))
    return _add_margin(weight_bytes + state_bytes + cache_bytes)


def _add_margin(num_bytes: int) -> int:
    return int(num_bytes / MAX_MEMORY_FRACTION)


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
    state_bytes = state_bytes // num_ranks + count_buffer_bytes(config, model, gpu=gpu)
    return _add_margin(TORCH_BASE_BYTES + state_bytes + trainer.pack_tokens * saved_elements * element_bytes)


def _count_moment_bytes(config: RunConfig, model: ModelSize, num_trained: float) -> int:
    """Return the bytes of the optimizer's moments; `auto` counts as float32. Embeddings and head have AdamW's."""
    optim = config.trainer.optim
    inner_bytes = {"8bit": QUANTIZED_MOMENT_BYTES}.get(optim.moments, MOMENT_BYTES)
    inner_bytes = MUON_MOMENT_BYTES if optim.type == "muon" else inner_bytes
    num_outer = 0 if config.trainer.lora.enabled else model.num_outer_parameters
    return int(num_outer * MOMENT_BYTES + (num_trained - num_outer) * inner_bytes)


def count_buffer_bytes(config: RunConfig, model: ModelSize, *, gpu: bool) -> int:
    """Return the bytes of the buffer from which engines copy the weights; 0 without one."""
    return count_weight_bytes(config, model, gpu=gpu) if config.weights.shares_memory else 0


def count_weight_bytes(config: RunConfig, model: ModelSize, *, gpu: bool) -> int:
    """Return the bytes of one published version of the weights."""
    return model.num_parameters * get_element_bytes(config.trainer.dtype, gpu)


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


MAX_VERSIONS = 4  # of weights on the disk: served, loaded, waiting, and being written
RESERVE_BYTES = 8 << 20  # for rollouts, ledger and logs


@dataclass(frozen=True, slots=True)
class DiskEstimate:
    """What a run writes to the disk of `directory`, and how many bytes there are for it, in bytes."""

    directory: Path
    checkpoint: int
    weights: int  # all versions of the published weights that are on the disk at the same time
    num_saves: int  # checkpoints that the run saves until its end
    keep_last: int
    available: int  # free space, and what checkpoints and weights of this run already take
    is_guessed: bool  # whether the size of the model is a guess from its name

    @property
    def num_fitting(self) -> int:
        """The number of checkpoints that fit beside the published weights and the reserve."""
        return max(0, self.available - self.weights - RESERVE_BYTES) // self.checkpoint

    def find_problem(self) -> str | None:
        """Return why the run cannot save all its steps; None if it can."""
        if self.num_fitting >= (num_needed := min(2, self.num_saves)):
            return None
        needed = self.weights + RESERVE_BYTES + num_needed * self.checkpoint
        reason = " (a new one is complete before the old one is removed)" if num_needed > 1 else ""
        advice = "free some space, set `output` to a larger disk, or train adapters ([trainer.lora])"
        return (
            f"the disk of {self.directory} is too small: {format_count(num_needed, 'checkpoint')} of "
            f"{format_size(self.checkpoint)}{reason}, published weights and logs need about "
            f"{format_size(needed)}, {format_size(self.available)} are available; {advice}"
        )

    def __str__(self) -> str:
        """The estimate as a line of a plan."""
        sizes = f"checkpoint {format_size(self.checkpoint)}, published weights {format_size(self.weights)}"
        return f"disk, roughly: {sizes}; {format_size(self.available)} available in {self.directory}"

    def find_warning(self) -> str | None:
        """Return why the run cannot keep as many checkpoints as it should; None if it can."""
        if (problem := self.find_problem()) is not None:
            return problem
        if self.num_fitting >= min(self.keep_last + 1, self.num_saves):
            return None
        fitting = f"the disk of {self.directory} has room for {self.num_fitting} checkpoints"
        return (
            f"{fitting} of {format_size(self.checkpoint)}; checkpoint.keep_last = {self.keep_last} needs "
            f"{self.keep_last + 1} for a moment: older ones are removed earlier, the last one never"
        )


def estimate_disk(config: RunConfig, nodes: Sequence[ClusterNode], *, fresh: bool = False) -> DiskEstimate | None:
    """Estimate the disk space of a run; None if the size of its model or the free space is unknown.

    `fresh` if it starts over, so that what is in its directory stays on the disk under another name.
    """
    if (model := ModelSize.from_name(config.model.name)) is None:
        return None
    trainer, directory = config.trainer, config.shared_path or config.path
    num_trained = model.num_parameters * (LORA_PARAMETER_FRACTION if trainer.lora.enabled else 1)
    num_versions = 1 if config.weights.is_in_memory else get_max_versions(config)
    gpu = uses_gpu(trainer.device, sum(node.num_gpus for node in nodes))
    parents = directory.absolute().parents
    # A shared directory that does not exist may be mounted on other machines only; any other directory is created here.
    available = _measure_available(directory, parents if config.shared_path is None else parents[:1], fresh=fresh)
    if available is None:
        return None
    return DiskEstimate(
        directory,
        checkpoint=max(1, int(num_trained * MASTER_BYTES) + _count_moment_bytes(config, model, num_trained)),
        weights=num_versions * count_weight_bytes(config, model, gpu=gpu),
        num_saves=math.ceil(config.max_steps / config.checkpoint.interval),
        keep_last=config.checkpoint.keep_last,
        available=available,
        is_guessed=model.is_guessed,
    )


def get_max_versions(config: RunConfig) -> int:
    """Return the number of published versions of the weights that exist at the same time."""
    return min(MAX_VERSIONS, config.max_steps + 1)


def _measure_available(directory: Path, parents: Sequence[Path], *, fresh: bool) -> int | None:
    """Return the free bytes for the run in `directory`. Unless it starts over, its checkpoints and weights are free.

    None if neither it nor one of `parents` exists, or the disk cannot be read or does not report its size.
    """
    try:
        with watch_storage(directory):
            existing = next((path for path in (directory, *parents) if path.exists()), None)
            free = None if existing is None else get_free_bytes(existing)
            own = [] if fresh else [directory / CHECKPOINTS_DIR, directory / WEIGHTS_DIR]
            return None if free is None else free + count_file_bytes(*own)
    except OSError:
        return None


def count_file_bytes(*directories: Path) -> int:
    """Return the size of all files below the directories, of hard links once, without those removed meanwhile."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, files in (entry for directory in directories for entry in os.walk(directory)):
        for file in files:
            with contextlib.suppress(OSError):
                status = Path(parent, file).lstat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def format_size(num_bytes: int) -> str:
    """Return a number of bytes as text."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
