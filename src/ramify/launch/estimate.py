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

TORCH = 1 << 30  # bytes a process that computes needs before it has a model
PLAIN = 150 << 20  # bytes of a process that does not
MASTER, MOMENTS, GRADIENT = 4, 8, 4  # bytes for each trained parameter
ADAPTED = 0.02  # share of parameters that adapters add
BY_NAME = re.compile(r"(\d+(?:\.\d+)?)([BM])(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a model that matter here; zeros where only its name is known."""

    parameters: int
    layers: int = 0
    hidden: int = 0
    inner: int = 0
    kv: int = 0
    """Elements of keys and values that one token has in one layer."""
    known: str = "from its files"

    @classmethod
    def of(cls, name: str) -> "Model | None":
        """The model called `name`; by what its name says where it is not here, None if that is nothing."""
        try:
            return cls._read(resolve_model_path(name))
        except (ModelNotFound, WeightsRefused, OSError, ValueError):
            found = BY_NAME.search(name.rsplit("/", 1)[-1])
        if found is None:
            return None
        scale = {"B": 10**9, "M": 10**6}[found[2].upper()]
        return cls._shaped(int(float(found[1]) * scale))

    @classmethod
    def _read(cls, directory: Path) -> "Model":
        about = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        about = about.get("text_config") or about
        parameters = sum(math.prod(shape) for shape in read_tensor_shapes(directory).values())
        hidden, heads = about.get("hidden_size", 0), about.get("num_attention_heads", 1)
        head = about.get("head_dim") or hidden // heads
        kv = 2 * head * (about.get("num_key_value_heads") or heads)
        return cls(parameters, about.get("num_hidden_layers", 0), hidden, about.get("intermediate_size", 0), kv)

    @classmethod
    def _shaped(cls, parameters: int) -> "Model":
        """A model of this size as models usually are: 12 hidden² parameters a layer, hidden about 40 times layers."""
        hidden = round((40 * parameters / 12) ** (1 / 3) / 128) * 128 or 128
        return cls(parameters, max(1, hidden // 40), hidden, 3 * hidden, 2 * 1024, "guessed from its name")


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes, by what they are for."""

    inference: int
    trainer: int
    rest: int


def need_of(config: RunConfig, model: Model, *, engine_gpu: bool, trainer_gpu: bool, memory: int) -> Need:
    """What each part needs, where it is; `memory` is that of the device which the engine runs on."""
    sources = len(config.train) + len(config.eval)
    rest = PLAIN * (2 + 2 * sources)
    inference = _inference(config, model, gpu=engine_gpu, memory=memory)
    return Need(inference, _trainer(config, model, gpu=trainer_gpu), rest)


def _inference(config: RunConfig, model: Model, *, gpu: bool, memory: int) -> int:
    """Weights, and a cache for as many requests as may run, as far as its share of the memory goes."""
    inference = config.inference
    if isinstance(inference, ExternalConfig):
        return 0
    width = _width(inference.dtype, gpu)
    weights, token = TORCH + model.parameters * width, model.layers * model.kv * width
    longest = inference.max_model_len or config.seq_len
    if isinstance(inference, VLLMConfig):
        return max(int(inference.memory * memory) if gpu else 0, weights + longest * token)
    tokens = inference.kv_tokens or longest * inference.max_running
    return weights + max(longest * token, min(tokens * token, int(inference.memory * memory)))


def _trainer(config: RunConfig, model: Model, *, gpu: bool) -> int:
    trainer = config.trainer
    width = _width(trainer.dtype, gpu)
    trained = model.parameters * (ADAPTED if trainer.lora.enabled else 1)
    state = model.parameters * (width if width < MASTER or trainer.lora.enabled else 0)
    state += int(trained * (MASTER + MOMENTS + GRADIENT))
    each = 8 * model.hidden + 4 * model.inner  # elements that one token leaves in one layer for the backward pass
    kept = model.layers * model.hidden + each if trainer.checkpoint_activations else model.layers * each
    ranks = config.launch.trainer_gpus
    return TORCH + state // ranks + trainer.pack_tokens * kept * width


def _width(dtype: str, gpu: bool) -> int:
    return 4 if dtype == "float32" or (dtype == "auto" and not gpu) else 2
