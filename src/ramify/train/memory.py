"""The size of a model, and an estimate of the memory that a trainer of it needs. Needs no torch.

The estimate covers weights and their remainders, optimizer state, gradients, the activations of one pack, and what the
kernels and the LM head work with. It is calibrated with measurements on an H200 in bfloat16: a training step with
packs of 16,384 tokens took at most 98.2 GiB for 3.7 B parameters (8-bit moments), the estimate is 99.5 GiB.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ramify.core.errors import ConfigInvalid, ModelNotFound, WeightsRefused
from ramify.model.experts import (
    LAYER_TYPE_ALIASES,
    OUTER_MATRIX_NAMES,
    RECURRENT_LAYER_TYPES,
    describe_experts,
    read_expert_counts,
)
from ramify.model.kernels.chunk_plan import CHUNK_SIZE, MIN_CHUNK_ROWS, round_up_width
from ramify.model.pack_layout import VISION_MODEL_TYPES
from ramify.model.resolve import resolve_model_path
from ramify.model.weights_manifest import TOWER_NAMES, read_tensor_shapes
from ramify.train.config import TrainerConfig

TORCH_BASE_BYTES = 1 << 30  # of a process with torch, without a model
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4  # per trained parameter
QUANTIZED_MOMENT_BYTES = 2.0625  # in 8 bits, with their scales
MUON_MOMENT_BYTES = 4
QUANTIZED_BYTES = {"8bit": 8.25 / 8, "4bit": 4.25 / 8}  # per fixed weight inside the layers
MAX_MEMORY_FRACTION = 0.95  # of a device that may be used; estimates include the rest
HEAD_BYTES = 5 << 30  # of the logits, and of their gradients, that the LM head holds at least, on a GPU
GUESSED_ORIGIN = "guessed from its name"
MLP_OUTPUT_NAMES = (".down_proj.weight", ".w2.weight")  # [hidden_size, intermediate_size]
IDEFICS3_VISION_DEFAULTS: dict[str, Any] = {  # of transformers, for keys that a config leaves out
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "patch_size": 32,
}
QWEN3_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "deepstack_visual_indexes": [8, 16, 24],
}
SIZE_IN_NAME = re.compile(r"(\d+(?:\.\d+)?)([BM])(?:-A(\d+(?:\.\d+)?)B)?(?![a-z])", re.IGNORECASE)  # 8B, 30B-A3B
GUESSED_EXPERTS = 8  # that process a token, of a mixture of experts

TensorShapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The bytes that one process needs of its device, by what they hold."""

    weights: int = 0  # with the remainders of master weights
    moments: int = 0
    gradients: int = 0
    activations: int = 0
    kv_cache: int = 0  # keys and values, and the states of recurrent layers
    workspace: int = 0  # the CUDA context, logits, and buffers of kernels

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def with_headroom(self) -> int:
        """How much of a device is needed, with the part that stays free."""
        return math.ceil(self.total / MAX_MEMORY_FRACTION)

    def __add__(self, other: "MemoryUse") -> "MemoryUse":
        return MemoryUse(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


@dataclass(frozen=True, slots=True)
class VisionSize:
    """The dimensions of a vision tower, with its projection to the decoder's width, that determine its memory."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    pixel_elements: int  # pixel values per patch
    patches_per_token: int  # patches that are merged into one image token
    num_outputs: int  # features per image token: one, and one more for each deepstack layer

    @classmethod
    def from_config(cls, hf_config: dict[str, Any], num_parameters: int) -> "VisionSize | None":
        """Read the size from a Hugging Face config, whose keys depend on the family; None if it takes no images."""
        if (model_type := hf_config.get("model_type")) not in VISION_MODEL_TYPES:
            return None
        defaults = QWEN3_VISION_DEFAULTS if model_type == "qwen3_vl" else IDEFICS3_VISION_DEFAULTS
        settings = hf_config.get("vision_config") or {}
        vision = defaults | {key: value for key, value in settings.items() if value is not None}
        num_frames, num_channels = vision.get("temporal_patch_size", 1), vision.get("in_channels", 3)
        return cls(
            num_parameters,
            num_layers=vision["depth" if model_type == "qwen3_vl" else "num_hidden_layers"],
            hidden_size=vision["hidden_size"],
            intermediate_size=vision["intermediate_size"],
            pixel_elements=num_frames * num_channels * vision["patch_size"] ** 2,
            patches_per_token=(vision.get("spatial_merge_size") or hf_config.get("scale_factor") or 2) ** 2,
            num_outputs=1 + len(vision.get("deepstack_visual_indexes", ())),
        )

    def estimate_bytes(self, num_tokens: int, element_bytes: int, *, num_layers: int, num_inputs: int) -> int:
        """Return the bytes of encoding images of `num_tokens` tokens.

        A layer has, for each patch: the inputs of both norms and their results; queries, keys and values, and the first
        two after the rotation; the attention's result, of each image and of all; and the product before and after the
        activation. `num_layers` layers hold all of this at the same time; of `num_inputs` further layers only the
        inputs are kept. Before the layers there are the pixel values, twice in float32 and once converted; after them,
        each projection has four rows of the tower's width.
        """
        patch_elements = num_layers * (11 * self.hidden_size + 2 * self.intermediate_size)
        patch_elements += num_inputs * self.hidden_size + self.pixel_elements + 4 * self.num_outputs * self.hidden_size
        patch_bytes = patch_elements * element_bytes + 2 * 4 * self.pixel_elements
        return num_tokens * self.patches_per_token * patch_bytes


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
    mixer_elements: int = 0  # activations per token of what a recurrent layer has in place of attention
    recurrent_row_elements: int = 0  # that an engine allocates for a recurrent layer, per row of a step
    num_active_experts: int = 0  # that process a token, of a mixture of experts
    num_outer_parameters: int = 0  # parameters of embeddings and head, whose moments are always float32
    query_elements: int = 0  # elements of the queries per token and layer
    vocab_size: int = 0
    adapter_elements: int = 0  # parameters that adapters of rank 1 add to all matrices in the layers
    origin: str = "from its files"
    vision: VisionSize | None = None  # None for a text model, and if the dimensions are guessed
    experts_note: str | None = None  # what to know about a mixture of experts before it is trained

    @property
    def num_tower_parameters(self) -> int:
        """The number of parameters of the vision tower."""
        return 0 if self.vision is None else self.vision.num_parameters

    @property
    def num_kv_layers(self) -> int:
        """The number of layers with keys and values."""
        return self.num_layers - self.num_recurrent_layers

    @property
    def layer_elements(self) -> int:
        """The activations of one layer per token that the backward pass needs, in elements; the mean of all layers.

        Inputs of both norms and their results; queries before and after the rotation, and the attention's result; keys
        before and after the rotation, and values; gate, up, and their product. With a mixture of experts, also the
        input and the result of each active expert.
        """
        queries = self.query_elements or self.hidden_size
        attention = 3 * queries + 3 * self.kv_elements // 2
        mixers = self.num_kv_layers * attention + self.num_recurrent_layers * self.mixer_elements
        hidden = (4 + 2 * self.num_active_experts) * self.hidden_size
        return hidden + 3 * self.intermediate_size + mixers // max(1, self.num_layers)

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
        num_active = None if match[3] is None else int(float(match[3]) * 10**9)
        return cls._from_parameter_counts(int(float(match[1]) * scale), num_active)

    @classmethod
    def _from_files(cls, directory: Path) -> "ModelSize":
        hf_config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        full_config, hf_config = hf_config, hf_config.get("text_config") or hf_config
        hidden_size, num_heads = hf_config.get("hidden_size", 0), hf_config.get("num_attention_heads", 1)
        head_dim = hf_config.get("head_dim") or hidden_size // num_heads
        shapes, experts = read_tensor_shapes(directory), read_expert_counts(full_config)
        if not shapes:
            raise WeightsRefused(f"{directory} has no weights")
        tower = _select(shapes, TOWER_NAMES)
        decoder = {name: shape for name, shape in shapes.items() if name not in tower}
        recurrent_layers = [name for name in _list_layer_types(hf_config) if name in RECURRENT_LAYER_TYPES]
        return cls(
            num_parameters=_count_elements(shapes),
            num_layers=hf_config.get("num_hidden_layers", 0),
            hidden_size=hidden_size,
            intermediate_size=_find_intermediate_size(hf_config, decoder, is_mixture=experts is not None),
            kv_elements=2 * head_dim * (hf_config.get("num_key_value_heads") or num_heads),
            state_elements=sum(_count_state_elements(name, hf_config) for name in recurrent_layers),
            num_recurrent_layers=len(recurrent_layers),
            mixer_elements=max((_count_mixer_elements(name, hf_config) for name in recurrent_layers), default=0),
            recurrent_row_elements=max((_count_row_elements(name, hf_config) for name in recurrent_layers), default=0),
            num_active_experts=0 if experts is None else experts.active,
            num_outer_parameters=_count_elements(_select(decoder, OUTER_MATRIX_NAMES)),
            query_elements=head_dim * num_heads,
            vocab_size=hf_config.get("vocab_size", 0),
            adapter_elements=_count_adapter_elements(decoder),
            vision=VisionSize.from_config(full_config, num_parameters=_count_elements(tower)),
            experts_note=describe_experts(full_config),
        )

    @classmethod
    def _from_parameter_counts(cls, num_parameters: int, num_active: int | None) -> "ModelSize":
        """Guess typical dimensions: 36 layers at 8 B, 12 hidden² parameters per layer, an eighth in the embeddings.

        A mixture of experts has the layers of a model with all its parameters, with the width of the active ones.
        """
        num_used = num_active or num_parameters
        num_outer = num_used // 8
        num_layers = max(1, round(36 * (num_parameters / 8e9) ** 0.2))
        hidden_size = round(((num_used - num_outer) / (12 * num_layers)) ** 0.5 / 128) * 128 or 128
        return cls(
            num_parameters,
            num_layers,
            hidden_size,
            intermediate_size=3 * hidden_size,
            kv_elements=2 * 1024,
            num_active_experts=GUESSED_EXPERTS if num_active else 0,
            num_outer_parameters=num_outer,
            vocab_size=num_outer // hidden_size,
            # per layer four matrices [h, h] and three [h, 3h]: 4·2h + 3·4h
            adapter_elements=num_layers * 20 * hidden_size,
            origin=GUESSED_ORIGIN,
        )


def _select(shapes: TensorShapes, parts: Sequence[str]) -> TensorShapes:
    """Return the shapes of the tensors in whose names one of the parts occurs."""
    return {name: shape for name, shape in shapes.items() if any(part in name for part in parts)}


def _count_elements(shapes: TensorShapes) -> int:
    return sum(map(math.prod, shapes.values()))


def _count_adapter_elements(shapes: TensorShapes) -> int:
    matrices = (shape for name, shape in _select(shapes, ["layers."]).items() if ".experts." not in name)
    return sum(map(sum, (shape for shape in matrices if len(shape) == 2)))


def _find_intermediate_size(hf_config: dict[str, Any], shapes: TensorShapes, *, is_mixture: bool) -> int:
    """Return the inner width of the MLPs; in a mixture, all experts of a token together.

    Dense models have it in their weights: LFM2 derives it from the config's `intermediate_size`.
    """
    from_config = hf_config.get("intermediate_size", 0)
    if is_mixture:
        return max(
            from_config, (hf_config.get("moe_intermediate_size") or 0) * (hf_config.get("num_experts_per_tok") or 0)
        )
    widths = [shape[-1] for name, shape in shapes.items() if name.endswith(MLP_OUTPUT_NAMES)]
    return max(widths, default=from_config)


def _list_layer_types(hf_config: dict[str, Any]) -> list[str]:
    """Return the types of layers by the names of transformers; Bamba's config has the indices of those that attend."""
    if (attending := hf_config.get("attn_layer_indices")) is not None:
        is_attention = [index in attending for index in range(hf_config.get("num_hidden_layers", 0))]
        return ["full_attention" if attends else "linear_attention" for attends in is_attention]
    return [LAYER_TYPE_ALIASES.get(name, name) for name in hf_config.get("layer_types") or ()]


def _count_state_elements(layer_type: str, hf_config: dict[str, Any]) -> int:
    """Return the elements of the state of one recurrent layer."""
    if layer_type == "conv":
        return hf_config.get("hidden_size", 0) * hf_config.get("conv_L_cache", 0)
    if _is_mamba2(hf_config):
        _, key_dim, keys, values = _read_mamba2(hf_config)
        return (2 * keys + values) * hf_config.get("mamba_d_conv", 0) + key_dim * values
    _, key_dim, keys, values = _read_delta_net(hf_config)
    return (2 * keys + values) * hf_config.get("linear_conv_kernel_dim", 0) + key_dim * values


def _count_mixer_elements(layer_type: str, hf_config: dict[str, Any]) -> int:
    """Return the activations of a recurrent layer that the backward pass needs, per token.

    Of a convolution: its three inputs, their product, its result, and the last product. Of a gated delta net: queries,
    keys and values before and after the convolution, and as the rule reads them; the gate, the rule's result before
    and after the norm; and a row of each inverse of a chunk. Of Mamba-2 the same without inverses (not measured).
    """
    if layer_type == "conv":
        return 6 * hf_config.get("hidden_size", 0)
    if _is_mamba2(hf_config):
        _, _, keys, values = _read_mamba2(hf_config)
        return 3 * (2 * keys + values) + 3 * values
    num_heads, _, keys, values = _read_delta_net(hf_config)
    return 3 * (2 * keys + values) + 3 * values + CHUNK_SIZE * num_heads


def _count_row_elements(layer_type: str, hf_config: dict[str, Any]) -> int:
    """Return what the operators of a recurrent layer allocate per row of an engine's step, in elements of two bytes.

    Of a convolution: its three inputs and its result. Of a gated delta net: the first projection, the convolution's
    result, and the rule's; queries, keys and values as the rule reads them; log decays and their sums, and strengths,
    in float32; and what `docs/design/recurrent-forests.md` calls T, U, W, N and S₀. The rule has padded heads. A
    sequence of MIN_CHUNK_ROWS rows has a chunk of its own, and each chunk has a state S₀. Of Mamba-2, which runs the
    model's own code: as measured in float32, nine tensors as large as its inputs, four with the keys of every head, and
    three numbers per head for each pair of tokens in a chunk.
    """
    if layer_type == "conv":
        return 4 * hf_config.get("hidden_size", 0)
    if _is_mamba2(hf_config):
        num_heads, key_dim, _, values = _read_mamba2(hf_config)
        return 2 * (9 * values + 4 * num_heads * key_dim + 3 * num_heads * hf_config.get("mamba_chunk_size", 0))
    num_heads, _, keys, values = _read_delta_net(hf_config)
    projections = (2 * keys + 2 * values + 2 * num_heads) + (2 * keys + values)
    num_heads, key_dim, keys, values = _read_delta_net(hf_config, round_up_width)
    rule = 2 * keys + 2 * values + 3 * 2 * num_heads
    return projections + rule + num_heads * (CHUNK_SIZE + key_dim) + 2 * values + key_dim * values // MIN_CHUNK_ROWS


def _is_mamba2(hf_config: dict[str, Any]) -> bool:
    """Return whether the linear attention of a model is Mamba-2."""
    return bool(hf_config.get("mamba_n_heads"))


def _read_mamba2(hf_config: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return the number of states of a Mamba-2 layer, the width of a key, and the widths of all keys and values."""
    key_dim, values = hf_config.get("mamba_d_state", 0), hf_config.get("mamba_expand", 0) * hf_config["hidden_size"]
    return hf_config["mamba_n_heads"], key_dim, hf_config.get("mamba_n_groups", 0) * key_dim, values


def _read_delta_net(
    hf_config: dict[str, Any], pad: Callable[[int], int] = lambda width: width
) -> tuple[int, int, int, int]:
    """Return the number of states of a gated delta net, the width of a key, and the widths of all keys and values.

    `pad` returns the width of a padded head.
    """
    key_dim, value_dim = (pad(hf_config.get(f"linear_{part}_head_dim", 0)) for part in ("key", "value"))
    num_heads = hf_config.get("linear_num_value_heads", 0)
    return num_heads, key_dim, hf_config.get("linear_num_key_heads", 0) * key_dim, num_heads * value_dim


def estimate_rank(
    trainer: TrainerConfig,
    model: ModelSize,
    *,
    gpu: bool,
    num_ranks: int = 1,
    copy_bytes: int = 0,
    quantize: str | None = None,
) -> MemoryUse:
    """Estimate the memory of one rank: its share of the weights and of the optimizer's state, and activations.

    `copy_bytes` are for a copy of the published weights; `quantize` is the format of fixed matrices.
    """
    element_bytes, num_trained = get_element_bytes(trainer.dtype, gpu), count_trained(trainer, model)
    # With FSDP, and for adapters, the model's weights are not a part of the master weights.
    is_separate = (element_bytes < MASTER_BYTES and num_ranks > 1) or trainer.lora.enabled
    master_bytes = MASTER_BYTES if is_separate else MASTER_BYTES - element_bytes
    weight_bytes = count_weight_bytes(model, element_bytes, quantize) + num_trained * master_bytes
    num_tokens, num_recomputed = trainer.max_pack_tokens, min(trainer.num_recomputed_layers, model.num_layers)
    saved_elements = (model.num_layers - num_recomputed) * model.layer_elements + num_recomputed * model.hidden_size
    head_bytes = min(2 * num_tokens * model.vocab_size * element_bytes, HEAD_BYTES) if gpu else 0
    if not trainer.lora.enabled:  # the gradient of the head is summed in float32
        head_bytes += 2 * GRADIENT_BYTES * model.vocab_size * model.hidden_size
    recomputed_bytes = num_tokens * model.layer_elements * element_bytes if num_recomputed else 0  # after the head
    return MemoryUse(
        weights=weight_bytes // num_ranks + copy_bytes,
        moments=count_moment_bytes(trainer, model) // num_ranks,
        gradients=num_trained * GRADIENT_BYTES // num_ranks,
        activations=num_tokens * saved_elements * element_bytes + (_estimate_image_bytes(trainer, model) if gpu else 0),
        workspace=TORCH_BASE_BYTES + max(head_bytes, recomputed_bytes),
    )


def _estimate_image_bytes(trainer: TrainerConfig, model: ModelSize) -> int:
    """Return the bytes of the images of a step, which are taken to have as many tokens as a pack; 0 for a text model.

    If the tower is trained, the backward pass needs its activations or, if layers are recomputed, their inputs. The
    features and their gradients are also in float32.
    """
    if (vision := model.vision) is None:
        return 0
    element_bytes = get_element_bytes(trainer.dtype, gpu=True)
    num_tokens, num_layers, num_inputs = trainer.max_pack_tokens, 1, 0
    if not (trainer.freeze_vision or trainer.lora.enabled):
        num_layers, num_inputs = (1, vision.num_layers) if trainer.num_recomputed_layers else (vision.num_layers, 0)
    tower_bytes = vision.estimate_bytes(num_tokens, element_bytes, num_layers=num_layers, num_inputs=num_inputs)
    return tower_bytes + num_tokens * vision.num_outputs * model.hidden_size * (element_bytes + 2 * GRADIENT_BYTES)


def count_weight_bytes(model: ModelSize, element_bytes: int, quantize: str | None) -> int:
    """Return the bytes of the weights of a model; `quantize` is the format of the matrices in the layers.

    Experts get no adapters, so they are never quantized; a mixture of experts is counted as if nothing were.
    """
    inner_bytes: float = element_bytes
    if quantize is not None and not model.num_active_experts:
        inner_bytes = QUANTIZED_BYTES[quantize]
    num_outer = model.num_outer_parameters + model.num_tower_parameters  # which are not quantized
    return num_outer * element_bytes + int((model.num_parameters - num_outer) * inner_bytes)


def check_recompute_layers(trainer: TrainerConfig, num_layers: int) -> None:
    """Raise ConfigInvalid if more layers are recomputed than the model has."""
    if trainer.num_recomputed_layers > num_layers:
        problem = f"the model has {num_layers} layers, got {trainer.num_recomputed_layers}"
        raise ConfigInvalid(f"{problem}; set at most {num_layers}, or 'auto'", key="trainer.recompute_layers")


def count_trained(trainer: TrainerConfig, model: ModelSize) -> int:
    """Return the number of parameters that are trained. With `lora.target_modules` there are fewer."""
    if trainer.lora.enabled:
        return model.adapter_elements * trainer.lora.rank
    return model.num_parameters - (model.num_tower_parameters if trainer.freeze_vision else 0)


def count_moment_bytes(trainer: TrainerConfig, model: ModelSize) -> int:
    """Return the bytes of the optimizer's moments; `auto` counts as float32. Embeddings and head have AdamW's."""
    optim = trainer.optim
    inner_bytes = {"8bit": QUANTIZED_MOMENT_BYTES}.get(optim.moments, MOMENT_BYTES)
    inner_bytes = MUON_MOMENT_BYTES if optim.type == "muon" else inner_bytes
    num_outer = 0 if trainer.lora.enabled else model.num_outer_parameters
    return int(num_outer * MOMENT_BYTES + (count_trained(trainer, model) - num_outer) * inner_bytes)


def get_element_bytes(dtype: str, gpu: bool) -> int:
    """Return the bytes of one weight of a process with the setting `dtype`; `auto` is float32 on a CPU."""
    return 4 if dtype == "float32" or (dtype == "auto" and not gpu) else 2
