"""Small random vision-language models of both families, and random images as they take them."""

import hashlib
from copy import deepcopy
from pathlib import Path
from random import Random

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, Idefics3Config, Qwen3VLConfig

from ramify.images import ProcessedImage
from ramify.model.logprob_check import split_attn_implementation
from ramify.trace import Media

VOCAB = 60
IMAGE, START, STOP = 57, 58, 59  # the image token, and the tokens around a run of them
TEXT = {
    "vocab_size": VOCAB,
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
CONFIGS = {
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
FAMILIES = list(CONFIGS)


def build_vision_model(family: str, attention: str, seed: int = 0):
    """Build a model whose attention implementation is that of its decoder."""
    torch.manual_seed(seed)
    config = deepcopy(CONFIGS[family])
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


def to_media(data: bytes) -> Media:
    """Return the media entry of an image's bytes."""
    return Media.from_bytes(data, "image/png")
