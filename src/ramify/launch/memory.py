"""Rough estimates of the memory and the disk space that a run needs, before anything is loaded.

The memory of an engine covers its weights, the KV cache and the states of recurrent layers. Its second copy of the
weights during an update is left out on a GPU: an engine that has no room for it uses host memory.

On the disk, a new checkpoint is complete before an old one is removed. So a run that saves more than once needs room
for two, and for one more than it keeps (`checkpoint.keep_last`, `keep_best`, `keep_interval`) to keep all of them.
"""

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ramify.core.files import get_free_bytes
from ramify.core.names import format_count
from ramify.core.watchdog import watch_storage
from ramify.infer.config import EngineAdaptersConfig, EngineConfig, EngineLimits, VLLMConfig
from ramify.launch.launcher import ClusterNode
from ramify.launch.machine import GIB, uses_gpu
from ramify.launch.process_configs import publishes_adapters
from ramify.orchestrate.run_config import RunConfig
from ramify.train.checkpoint_manifest import CHECKPOINTS_DIR
from ramify.train.memory import (
    MASTER_BYTES,
    MAX_MEMORY_FRACTION,
    TORCH_BASE_BYTES,
    MemoryUse,
    ModelSize,
    count_moment_bytes,
    count_trained,
    count_weight_bytes,
    estimate_rank,
    get_element_bytes,
)
from ramify.train.weights_directory import WEIGHTS_DIR

PROCESS_BASE_BYTES = 150 << 20  # of a process without torch
FLOAT32_BYTES = 4  # per element of logits, and of the states of recurrent layers
# Products with many rows dequantize a part of a matrix at a time, `DEQUANTIZED_PART_BYTES` of the kernels for CUDA: one
# part in the memory of captured graphs, and one outside of it.
DEQUANTIZED_PARTS_BYTES = 2 * (64 << 20)


def estimate_engine(
    inference: EngineConfig | VLLMConfig,
    seq_len: int,
    model: ModelSize,
    *,
    num_gpus: int,
    device_memory: int,
    adapters: EngineAdaptersConfig | None = None,
) -> MemoryUse:
    """Estimate weights, a KV cache for the most running requests, limited by its fraction of the memory, and buffers.

    The result is for each of its GPUs or, if it has none, for the memory of its node. An engine on a GPU holds the
    matrices beside `adapters` in their format.
    """
    element_bytes, gpu = get_element_bytes(inference.dtype, num_gpus > 0), num_gpus > 0
    # If `target_modules` is set, only these matrices are quantized; all of them are counted with the full dtype.
    quantize = adapters.quantize if gpu and adapters is not None and not adapters.target_modules else None
    weight_bytes = count_weight_bytes(model, element_bytes, quantize) // max(1, num_gpus)
    weight_bytes += 0 if adapters is None else adapters.rank * _count_unmerged_elements(model) * element_bytes
    token_bytes = model.num_kv_layers * model.kv_elements * element_bytes // max(1, num_gpus)
    max_len, limits = inference.max_model_len or seq_len, get_engine_limits(inference, gpu=gpu)
    outer_elements = 2 * model.query_elements + model.kv_elements + 3 * model.intermediate_size
    row_elements = 3 * model.hidden_size + max(outer_elements, model.recurrent_row_elements)
    buffer_bytes = limits.max_num_batched_tokens * row_elements * element_bytes if gpu else 0
    buffer_bytes += 3 * limits.max_running_requests * model.vocab_size * FLOAT32_BYTES if gpu else 0  # logits
    if quantize is not None:  # products dequantize parts of a matrix, or a complete one in the model's own code
        buffer_bytes += DEQUANTIZED_PARTS_BYTES + model.hidden_size * model.intermediate_size * element_bytes
    workspace = TORCH_BASE_BYTES + buffer_bytes
    if isinstance(inference, VLLMConfig):
        fraction = min(inference.memory_fraction, MAX_MEMORY_FRACTION) if gpu else 0.0
        cache_bytes = max(max_len * token_bytes, int(fraction * device_memory) - weight_bytes - workspace)
        return MemoryUse(weights=weight_bytes, kv_cache=cache_bytes, workspace=workspace)
    if gpu and model.vision is not None:  # a prefill may be one large image, and features are kept
        batched = limits.max_num_batched_tokens
        workspace += model.vision.estimate_bytes(batched, element_bytes, num_layers=1, num_inputs=0)
        workspace += inference.image_cache_mib << 20
    state_bytes = (limits.max_running_requests + limits.num_state_snapshots) * model.state_elements * FLOAT32_BYTES
    cache_limit = int(limits.kv_memory_fraction * device_memory) - state_bytes
    cache_bytes = max(max_len * token_bytes, min(max_len * limits.max_running_requests * token_bytes, cache_limit))
    if inference.kv_cache_tokens is not None:
        cache_bytes = inference.kv_cache_tokens * token_bytes
    return MemoryUse(weights=weight_bytes, kv_cache=state_bytes + cache_bytes, workspace=workspace)


def _count_unmerged_elements(model: ModelSize) -> int:
    """Return the elements of adapters of rank 1 beside all matrices of the layers, as a native engine holds them.

    A product of n matrices has one adapter of n times the rank, with zeros between the adapters of the matrices:
    queries, keys and values are such a product, and gate and up. The projections of a recurrent layer have fewer
    elements than twice its activations.
    """
    queries = model.query_elements or model.hidden_size
    attention = 4 * model.hidden_size + 4 * queries + 3 * model.kv_elements
    mixers = model.num_kv_layers * attention + 2 * model.num_recurrent_layers * model.mixer_elements
    return mixers + model.num_layers * (3 * model.hidden_size + 5 * model.intermediate_size)


def get_engine_limits(inference: EngineConfig | VLLMConfig, *, gpu: bool) -> EngineLimits:
    """Return the limits of an engine. vLLM is taken to have the limits of a native engine."""
    return (_as_native_engine(inference) if isinstance(inference, VLLMConfig) else inference).get_limits(gpu=gpu)


def choose_vllm_fraction(
    inference: VLLMConfig, model: ModelSize, num_tokens: int, *, num_gpus: int, device_memory: int
) -> float | None:
    """Return the fraction of a GPU's memory that vLLM needs for a KV cache of `num_tokens`, as a native engine would.

    vLLM fills all of its fraction, and allocates CUDA graphs beside it, which have the part that stays free. None if
    the GPU is too small.
    """
    native = _as_native_engine(inference, kv_cache_tokens=num_tokens)
    use = estimate_engine(native, 0, model, num_gpus=num_gpus, device_memory=device_memory)
    if use.with_headroom > device_memory:
        return None
    return min(math.ceil(100 * use.total / device_memory) / 100, MAX_MEMORY_FRACTION)


def _as_native_engine(inference: VLLMConfig, *, kv_cache_tokens: int | None = None) -> EngineConfig:
    """Return a native engine that needs the memory that vLLM is taken to need."""
    running = inference.max_running_requests or "auto"
    return EngineConfig(dtype=inference.dtype, max_running_requests=running, kv_cache_tokens=kv_cache_tokens)


def estimate_trainer(config: RunConfig, model: ModelSize, *, gpu: bool, num_ranks: int) -> MemoryUse:
    """Estimate the memory of one rank. Engines copy its own weights; those with merged adapters are kept apart."""
    copy_bytes = count_copy_bytes(config, model, gpu=gpu) if config.trainer.lora.enabled or not gpu else 0
    return estimate_rank(
        config.trainer, model, gpu=gpu, num_ranks=num_ranks, copy_bytes=copy_bytes, quantize=config.model.quantize
    )


def count_copy_bytes(config: RunConfig, model: ModelSize, *, gpu: bool) -> int:
    """Return the bytes of the copy from which the directories of shared weights are written; 0 if none are shared."""
    return count_version_bytes(config, model, gpu=gpu) if config.weights.shares_memory else 0


def count_version_bytes(config: RunConfig, model: ModelSize, *, gpu: bool) -> int:
    """Return the bytes of one published version of the weights."""
    num_weights = count_trained(config.trainer, model) if publishes_adapters(config) else model.num_parameters
    return num_weights * get_element_bytes(config.trainer.dtype, gpu)


MAX_VERSIONS = 4  # of weights on the disk: served, loaded, waiting, and being written
RESERVE_BYTES = 8 << 20  # for rollouts, ledger and logs


@dataclass(frozen=True, slots=True)
class DiskEstimate:
    """What a run writes to the disk of `directory`, and how many bytes there are for it, in bytes."""

    directory: Path
    checkpoint: int
    weights: int  # all versions of the published weights that are on the disk at the same time
    num_saves: int  # checkpoints that the run saves until its end
    num_kept: int  # checkpoints that the run keeps
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
        if self.num_fitting >= min(self.num_kept + 1, self.num_saves):
            return None
        fitting = f"the disk of {self.directory} has room for {self.num_fitting} checkpoints"
        return (
            f"{fitting} of {format_size(self.checkpoint)}; checkpoint.keep_last, keep_best and keep_interval need "
            f"{self.num_kept + 1} for a moment: older ones are removed earlier, the last one never"
        )


def estimate_disk(config: RunConfig, nodes: Sequence[ClusterNode], *, fresh: bool = False) -> DiskEstimate | None:
    """Estimate the disk space of a run; None if the size of its model or the free space is unknown.

    `fresh` if it starts over, so that what is in its directory stays on the disk under another name.
    """
    if (model := ModelSize.from_name(config.model.name)) is None:
        return None
    trainer, directory = config.trainer, config.shared_path or config.path
    num_versions = 1 if config.weights.is_in_memory else get_max_versions(config)
    gpu = uses_gpu(trainer.device, sum(node.num_gpus for node in nodes))
    parents = directory.absolute().parents
    # A shared directory that does not exist may be mounted on other machines only; any other directory is created here.
    available = _measure_available(directory, parents if config.shared_path is None else parents[:1], fresh=fresh)
    if available is None:
        return None
    return DiskEstimate(
        directory,
        checkpoint=max(1, count_trained(trainer, model) * MASTER_BYTES + count_moment_bytes(trainer, model)),
        weights=num_versions * count_version_bytes(config, model, gpu=gpu),
        num_saves=(num_saves := math.ceil(config.max_steps / config.checkpoint.interval)),
        num_kept=config.checkpoint.count_kept(num_saves),
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
