"""What engine and trainer do with a model, by its config alone: the row of `docs/models.md`, and of `ramify doctor`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.core.errors import ModelUnsupported
from ramify.model.experts import describe_experts, read_expert_counts
from ramify.model.fused_model import can_fuse
from ramify.model.load import load_config, read_shape
from ramify.model.pack_layout import VISION_MODEL_TYPES, choose_pack_layout, describe_pack_layout

REFUSED = "refused"
OWN_CODE = "own code"  # transformers' code of the model, with the paged cache
VLLM_ADVICE = 'inference.engine = "vllm" runs it in vLLM, if that knows the model'


@dataclass(frozen=True, slots=True)
class ModelSupport:
    """How a family of models runs.

    `engine` is `fused`, `own code` or `refused`; `trainer` is `forest`, `chains` or `refused`; `lora` says which linear
    maps get adapters; `images` is whether images are read. `notes` are sentences with reasons.
    """

    model_type: str
    engine: str
    trainer: str
    lora: str
    images: str
    notes: tuple[str, ...] = ()


def read_model_support(config: Any) -> ModelSupport:
    """Return how the model of a Hugging Face config runs."""
    notes: list[str] = []
    try:
        read_shape(config)
        engine = "fused" if can_fuse(config.get_text_config()) else OWN_CODE
    except ModelUnsupported as error:
        engine = REFUSED
        notes.append(f"engine: {error}")
    if engine != "fused":
        notes.append(f"engine: {VLLM_ADVICE}")
    try:
        trainer = choose_pack_layout(config).value
        notes.append(f"trainer: {describe_pack_layout(config)}")
    except ModelUnsupported as error:
        trainer = REFUSED
        notes.append(f"trainer: {error}")
    settings = config.to_dict()
    if experts := describe_experts(settings):
        notes.append(experts)
    lora = "no" if trainer == REFUSED else "not experts" if read_expert_counts(settings) else "yes"
    images = "yes" if config.model_type in VISION_MODEL_TYPES else "no"
    return ModelSupport(config.model_type, engine, trainer, lora, images, tuple(notes))


def read_directory_support(path: Path) -> ModelSupport:
    """Return how the model in a directory runs; only its config is read."""
    try:
        return read_model_support(load_config(path))
    except ModelUnsupported as error:
        return ModelSupport(_read_model_type(path / "config.json"), REFUSED, REFUSED, "no", "no", (str(error),))


def _read_model_type(path: Path) -> str:
    """Return the family that a config names, also if it cannot be loaded."""
    try:
        return str(json.loads(path.read_text("utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"
