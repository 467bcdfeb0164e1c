"""How much memory a run needs, roughly, before anything is loaded.

Counted are what dominates: weights, the optimizer's state, the activations of one pack, the cache of keys and values.
Checked against one measurement (Qwen3-0.6B, bf16, packs of 16k tokens: 30 GiB); good for "does it fit", not for more.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from ramify.errors import ModelNotFound, WeightsRefused
from ramify.infer.config import ExternalConfig, VLLMConfig
from ramify.model.manifest import read_tensor_shapes
from ramify.model.resolve import resolve_model_path
from ramify.orchestrate.config import RunConfig

TORCH_BASE_BYTES = 1 << 30  # bytes a process that computes needs before it has a model
PROCESS_BASE_BYTES = 150 << 20  # bytes of a process that does not
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4  # bytes for each trained parameter
LORA_PARAMETER_FRACTION = 0.02  # share of parameters that adapters add
SIZE_IN_NAME = re.compile(r"(\d+(?:\.\d+)?)([BM])(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that matter here; zeros where only its name is known."""

    num_parameters: int
    num_layers: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    kv_elements: int = 0
    """Elements of keys and values that one token has in one layer."""
    origin: str = "from its files"

    @classmethod
    def from_name(cls, name: str) -> "ModelSize | None":
        """The model called `name`; by what its name says where it is not here, None if that is nothing."""
        try:
            return cls._from_files(resolve_model_path(name))
        except (ModelNotFound, WeightsRefused, OSError, ValueError):
            found = SIZE_IN_NAME.search(name.rsplit("/", 1)[-1])
        if found is None:
            return None
        scale = {"B": 10**9, "M": 10**6}[found[2].upper()]
        return cls._from_parameter_count(int(float(found[1]) * scale))

    @classmethod
    def _from_files(cls, directory: Path) -> "ModelSize":
        hf_config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        hf_config = hf_config.get("text_config") or hf_config
        parameters = sum(math.prod(shape) for shape in read_tensor_shapes(directory).values())
        hidden, heads = hf_config.get("hidden_size", 0), hf_config.get("num_attention_heads", 1)
        head = hf_config.get("head_dim") or hidden // heads
        kv = 2 * head * (hf_config.get("num_key_value_heads") or heads)
        return cls(parameters, hf_config.get("num_hidden_layers", 0), hidden, hf_config.get("intermediate_size", 0), kv)

    @classmethod
    def _from_parameter_count(cls, num_parameters: int) -> "ModelSize":
        """A model of this size as models usually are: 12 hidden² parameters a layer, hidden about 40 times layers."""
        hidden = round((40 * num_parameters / 12) ** (1 / 3) / 128) * 128 or 128
        return cls(num_parameters, max(1, hidden // 40), hidden, 3 * hidden, 2 * 1024, "guessed from its name")


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes, by what they are for."""

    inference: int
    trainer: int
    other: int


def estimate_memory(
    config: RunConfig, model: ModelSize, *, engine_gpu: bool, trainer_gpu: bool, device_memory: int
) -> MemoryEstimate:
    """What each part needs, where it is; `memory` is that of the device which the engine runs on."""
    sources = len(config.train) + len(config.eval)
    rest = PROCESS_BASE_BYTES * (2 + 2 * sources)
    inference = _estimate_inference(config, model, gpu=engine_gpu, device_memory=device_memory)
    return MemoryEstimate(inference, _estimate_trainer(config, model, gpu=trainer_gpu), rest)


def _estimate_inference(config: RunConfig, model: ModelSize, *, gpu: bool, device_memory: int) -> int:
    """Weights, and a cache for as many requests as may run, as far as its share of the memory goes."""
    inference = config.inference
    if isinstance(inference, ExternalConfig):
        return 0
    width = _bytes_per_element(inference.dtype, gpu)
    weights, token = TORCH_BASE_BYTES + model.num_parameters * width, model.num_layers * model.kv_elements * width
    longest = inference.max_model_len or config.seq_len
    if isinstance(inference, VLLMConfig):
        return max(int(inference.memory * device_memory) if gpu else 0, weights + longest * token)
    tokens = inference.kv_tokens or longest * inference.max_running
    return weights + max(longest * token, min(tokens * token, int(inference.memory * device_memory)))


def _estimate_trainer(config: RunConfig, model: ModelSize, *, gpu: bool) -> int:
    trainer = config.trainer
    width = _bytes_per_element(trainer.dtype, gpu)
    trained = model.num_parameters * (LORA_PARAMETER_FRACTION if trainer.lora.enabled else 1)
    state_bytes = model.num_parameters * (width if width < MASTER_BYTES or trainer.lora.enabled else 0)
    state_bytes += int(trained * (MASTER_BYTES + MOMENT_BYTES + GRADIENT_BYTES))
    activation_elements = (
        8 * model.hidden_size + 4 * model.intermediate_size
    )  # elements that one token leaves in one layer for the backward pass
    saved_elements = (
        model.num_layers * model.hidden_size + activation_elements
        if trainer.checkpoint_activations
        else model.num_layers * activation_elements
    )
    ranks = config.launch.trainer_gpus
    return TORCH_BASE_BYTES + state_bytes // ranks + trainer.pack_tokens * saved_elements * width


def _bytes_per_element(dtype: str, gpu: bool) -> int:
    return 4 if dtype == "float32" or (dtype == "auto" and not gpu) else 2
