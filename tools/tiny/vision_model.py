"""`tiny-vision` as a directory: config, tokenizer, chat template and image processor of a small Idefics3.

An image is scaled to 32 × 32 pixels, which become 16 patches and, merged 2 × 2, 4 tokens. Text is bytes, as in `tiny`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Idefics3Config, Idefics3ForConditionalGeneration
from transformers.utils import logging

from tools.tiny.tokenizer import CHAT_TEMPLATE, IM_END, MAX_POSITIONS, PAD, VOCAB_SIZE, build_tokenizer, write_tokenizer

IMAGE_TOKEN = "<image>"
IMAGE_TOKENS = ["<fake_token_around_image>", "<global-img>", IMAGE_TOKEN]
IMAGE_PIXELS, PATCH_PIXELS, SCALE_FACTOR = 32, 8, 2
IMAGE_PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_convert_rgb": True,
    "do_image_splitting": False,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": IMAGE_PIXELS},
    "resample": 1,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": IMAGE_PIXELS},
}
PROCESSOR = {
    "processor_class": "Idefics3Processor",
    "image_seq_len": (IMAGE_PIXELS // PATCH_PIXELS // SCALE_FACTOR) ** 2,
}
SHOW_CONTENT = """\
{%- macro show(content) -%}
{%- if content is string -%}
{{ content }}
{%- else -%}
{%- for part in content or [] -%}
{{ '<image>' if part.type == 'image' else part.text }}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
VISION_CHAT_TEMPLATE = SHOW_CONTENT + CHAT_TEMPLATE.replace(
    "{{ message.content }}", "{{ show(message.content) }}"
).replace("{{ message.content or '' }}", "{{ show(message.content) }}")


def build_vision_config() -> Idefics3Config:
    """Build the config, of 0.4 million parameters."""
    tokenizer: Any = build_tokenizer(IMAGE_TOKENS)
    end, pad = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(PAD)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    return Idefics3Config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": IMAGE_PIXELS,
            "patch_size": PATCH_PIXELS,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
            "initializer_range": 0.06,
            "tie_word_embeddings": False,
            **ends,
        },
        scale_factor=SCALE_FACTOR,
        image_token_id=tokenizer.token_to_id(IMAGE_TOKEN),
        tie_word_embeddings=False,
        dtype="bfloat16",
        **ends,
    )


def write_initial_vision_model(directory: Path, seed: int) -> None:
    """Write a complete model directory with random weights."""
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    _write(Idefics3ForConditionalGeneration(build_vision_config()).float(), directory)


def write_bfloat16_vision_model(trained_directory: Path, directory: Path) -> None:
    """Write a trained model as it ships."""
    logging.disable_progress_bar()
    model = Idefics3ForConditionalGeneration.from_pretrained(
        trained_directory, dtype=torch.bfloat16, local_files_only=True
    )
    _write(model, directory)


def _write(model: Idefics3ForConditionalGeneration, directory: Path) -> None:
    config = model.config
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True
    )
    model.save_pretrained(directory)
    write_tokenizer(directory, build_tokenizer(IMAGE_TOKENS), VISION_CHAT_TEMPLATE)
    for name, settings in (("preprocessor_config.json", IMAGE_PROCESSOR), ("processor_config.json", PROCESSOR)):
        (directory / name).write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    for file in directory.iterdir():
        file.chmod(0o644)  # transformers makes weights readable only for their owner
