"""Tiny random models, engines that run them, and images as vision models take them."""

import hashlib
import json
import os
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Idefics3Config,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
)
from transformers.utils import logging

from ramify.infer.config import EngineConfig
from ramify.infer.engine_core import EngineCore
from ramify.infer.request import EngineRequest
from ramify.model.images import ProcessedImage
from ramify.model.load import load_engine_model
from ramify.model.logprob_check import split_attn_implementation
from ramify.model.precision import disable_tf32_convolutions
from ramify.model.weights import get_untied_tensors, publish_weights
from ramify.trace.version import PolicyVersion

torch.set_num_threads(1)  # tests run in parallel, and small matrices gain nothing from a second thread
disable_tf32_convolutions()  # as the process of an engine does
logging.disable_progress_bar()

DEVICE = os.environ.get("RAMIFY_TEST_DEVICE", "cpu")  # the same tests on a GPU: cuda
DTYPE = os.environ.get("RAMIFY_TEST_DTYPE", "float32")  # the logprob property in bfloat16
VOCAB = 96
POSITIONS = 256
RANDOM_MODEL_SIZES = {
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "max_position_embeddings": 128,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
MAMBA2 |= {"mamba_n_groups": 2, "mamba_chunk_size": 16}
# Settings of small models with a fused forward, by type, beside RANDOM_MODEL_SIZES.
FUSED: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "phi3": {"initializer_range": 0.3},
    "seed_oss": {"initializer_range": 0.3},
    "smollm3": {"initializer_range": 0.3, "no_rope_layers": [1, 0]},
    "granite": {
        "initializer_range": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.7,
        "logits_scaling": 5.0,
    },
}


def write_llama(
    directory: Path,
    seed: int = 0,
    positions: int = POSITIONS,
    head_dim: int = 8,
    vocab: int = VOCAB,
    hidden_size: int = 32,
) -> Path:
    """Write a model whose weights are exact in bfloat16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).bfloat16().float().save_pretrained(directory)
    return directory


def write_random_model(model_type: str, directory: Path, **settings) -> Path:
    """Write a small random model of a type."""
    defaults = AutoConfig.for_model(model_type)
    sizes = {key: value for key, value in RANDOM_MODEL_SIZES.items() if hasattr(defaults, key)}
    config = AutoConfig.for_model(model_type, **sizes, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for weight in model.parameters():
        if weight.ndim > 1 and not weight.any():  # a router: each device would choose others of its equal experts
            torch.nn.init.normal_(weight, std=0.02)
    model.save_pretrained(directory)
    return directory


def reference(directory: Path, dtype: str = "float32"):
    """Load the model for transformers' own forward."""
    torch_dtype = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch_dtype, attn_implementation="eager").eval()


def publish_as(directory: Path, source: Path, version: PolicyVersion) -> Path:
    """Publish the weights of the model in `source` as a version."""
    return publish_weights(directory, get_untied_tensors(reference(source)), version, base_model=source)


def build_core(directory: Path, version: PolicyVersion = PolicyVersion("llama"), **settings) -> EngineCore:  # noqa: B008
    defaults = {
        "device": DEVICE,
        "dtype": "float32",
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "max_running_requests": 16,
    }
    config = {**defaults, **settings}
    model = load_engine_model(directory, dtype=config["dtype"], device=config["device"])
    return EngineCore(model, EngineConfig(**config), version)


def run(core: EngineCore, *requests: EngineRequest) -> list[EngineRequest]:
    """Run requests to their end."""
    for request in requests:
        core.enqueue(request)
    while core.has_unfinished_requests:
        core.step()
    return list(requests)


def sampled_ids(request: EngineRequest) -> list[int]:
    return request.token_ids[len(request.prompt_token_ids) :]


@torch.no_grad()
def scores(model, tokens: list[int], temperature: float) -> torch.Tensor:
    """Return log softmax(logits / T) at every position, by transformers' own forward."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0] / (temperature or 1.0), -1)


def write_qwen3_next(directory: Path, seed: int = 0, **settings) -> Path:
    """Write a model whose weights are exact in bfloat16: linear attention, then full attention with experts."""
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mlp_only_layers": [0],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    Qwen3NextForCausalLM(Qwen3NextConfig(**defaults | settings)).bfloat16().float().save_pretrained(directory)
    return directory


QWEN3_5 = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def write_qwen3_5(directory: Path, seed: int = 0, **settings) -> Path:
    """Write a dense model whose weights are exact in bfloat16: linear attention, then full attention."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**QWEN3_5 | settings))
    _randomize_vectors(model)
    model.bfloat16().float().save_pretrained(directory)
    return directory


def write_qwen3_5_with_images(directory: Path, seed: int = 0, **settings) -> Path:
    """Write such a model as it is published: with a vision tower, with heads for several tokens, in bfloat16."""
    torch.manual_seed(seed)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    config = Qwen3_5Config(
        text_config=QWEN3_5 | settings, vision_config={**vision, "out_hidden_size": 32}, tie_word_embeddings=True
    )
    model = Qwen3_5ForConditionalGeneration(config).bfloat16()
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(32, 64).bfloat16()}, file, {"format": "pt"})
    file = directory / "config.json"
    table = json.loads(file.read_text())
    table["text_config"]["dtype"] = table.pop("dtype")
    file.write_text(json.dumps(table))
    return directory


def write_lfm2(directory: Path, seed: int = 0, **settings) -> Path:
    """Write a dense model whose weights are exact in bfloat16: convolutions around full attention."""
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 96,
        "block_multiple_of": 16,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "conv_bias": True,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    model = Lfm2ForCausalLM(Lfm2Config(**defaults | settings))
    _randomize_vectors(model)
    model.bfloat16().float().save_pretrained(directory)
    return directory


def _randomize_vectors(model: torch.nn.Module) -> None:
    """Change norms and biases: zeros and ones would hide how they are applied."""
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith(".bias"):
            torch.nn.init.normal_(weight, weight.mean().item(), 0.2)


# Qwen3-Next is run by the model's own code, the others are fused.
HYBRIDS = {"qwen3_next": write_qwen3_next, "qwen3_5": write_qwen3_5, "lfm2": write_lfm2}


# -- vision-language models -------------------------------------------------------------------------------------------

VISION_VOCAB = 60
IMAGE, START, STOP = 57, 58, 59  # the image token, and the tokens around a run of them
TEXT = {
    "vocab_size": VISION_VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
VISION_CONFIGS = {
    "idefics3": Idefics3Config(
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "initializer_range": 0.1,
        },
        text_config={**TEXT, "model_type": "llama"},
        scale_factor=2,
        image_token_id=IMAGE,
        tie_word_embeddings=True,
        pad_token_id=0,
    ),
    "qwen3_vl": Qwen3VLConfig(
        vision_config={
            "depth": 3,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 2,
            "temporal_patch_size": 1,
            "spatial_merge_size": 2,
            "out_hidden_size": 48,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.1,
        },
        text_config={
            **TEXT,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        image_token_id=IMAGE,
        video_token_id=56,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
    ),
}
FAMILIES = list(VISION_CONFIGS)


def build_vision_model(family: str, attention: str, seed: int = 0):
    """Build a model with the given attention implementation in its decoder."""
    torch.manual_seed(seed)
    config = deepcopy(VISION_CONFIGS[family])
    model = AutoModelForImageTextToText.from_config(
        config, attn_implementation=split_attn_implementation(config, attention), dtype=torch.float32
    )
    for name, weight in model.named_parameters():
        if name.endswith("k_proj.bias"):
            weight.requires_grad_(False)  # attention does not depend on it: its gradient is only rounding errors
        if weight.ndim < 2 and "text_model" not in name and "language_model" not in name:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.1)
    return model


def write_vision_model(directory: Path, family: str, seed: int = 0) -> Path:
    """Write a model directory without a tokenizer; its weights are exact in bfloat16."""
    build_vision_model(family, "eager", seed).bfloat16().float().save_pretrained(directory)
    return directory


def process(family: str, data: bytes) -> ProcessedImage:
    """Return a random image that depends on `data`: of one or two tiles, or on a grid of random shape."""
    hash = hashlib.sha256(data).hexdigest()
    rng = np.random.default_rng(list(data))
    if family == "idefics3":
        tiles = int(rng.integers(1, 3))
        pixels = rng.normal(size=(tiles, 3, 16, 16)).astype(np.float32)
        return ProcessedImage(hash, family, {"pixel_values": pixels}, (1, 1, tiles), 4 * tiles)
    rows, columns = (int(size) for size in rng.integers(1, 4, 2))
    grid = np.array([[1, 2 * rows, 2 * columns]], np.int64)
    pixels = rng.normal(size=(grid.prod(), 3 * 4)).astype(np.float32)
    return ProcessedImage(
        hash, family, {"pixel_values": pixels, "image_grid_thw": grid}, (1, rows, columns), rows * columns
    )


def load_image(family: str):
    """Return how a trainer loads an image."""
    return lambda media: process(family, media.data)


def draw_image_run(rng: Random, family: str, data: bytes) -> tuple[list[int], tuple[int, int, bytes]]:
    """Return the tokens of an image between some text, and its run in them: for tiles with separators inside."""
    image = process(family, data)
    before, after = ([rng.randrange(3, 50) for _ in range(rng.randint(1, 4))] for _ in range(2))
    if family == "qwen3_vl":
        tokens = [*before, START, *[IMAGE] * image.num_tokens, STOP, *after]
        start = len(before) + 1
        return tokens, (start, start + image.num_tokens, data)
    run = [START]
    for _ in range(image.num_tokens // 4):
        run += [*[IMAGE] * 4, STOP]
    return [*before, *run, *after], (len(before), len(before) + len(run), data)


def build_image_inputs(family: str):
    """Return how plain transformers gets the images of a path."""

    def build(ids: list[int], images: list[bytes]) -> dict[str, torch.Tensor]:
        processed = [process(family, data) for data in images]
        if not processed:
            return {}
        pixels = torch.cat([torch.from_numpy(image.arrays["pixel_values"]) for image in processed])
        if family == "idefics3":
            return {"pixel_values": pixels.unsqueeze(0)}
        grids = torch.cat([torch.from_numpy(image.arrays["image_grid_thw"]) for image in processed])
        token_types = (torch.tensor([ids]) == IMAGE).int()
        return {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": token_types}

    return build
