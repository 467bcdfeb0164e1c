"""Images, and directories of vision models without weights: a config, a tokenizer and a template."""

import base64
import json
import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer

import ramify
from ramify.trace import Media


def make_pixels(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Smooth colours with some noise: resampling filters differ on it."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / (7 + 3 * c)) + np.cos(columns / (11 + 2 * c)) for c in range(3)]
    values = 127 + 50 * np.stack(waves, axis=-1) + rng.normal(0, 12, (height, width, 3))
    return values.clip(0, 255).astype(np.uint8)


def encode_image(pixels: np.ndarray, format: str = "PNG", mode: str | None = None, **options) -> bytes:
    image = Image.fromarray(pixels)
    buffer = BytesIO()
    (image.convert(mode) if mode else image).save(buffer, format, **options)
    return buffer.getvalue()


def data_url(media: Media) -> str:
    """Return the URL that holds an image."""
    return f"data:{media.mime};base64,{base64.b64encode(media.data).decode()}"


def make_media(width: int, height: int, format: str = "PNG", seed: int = 0, **options) -> Media:
    return Media.from_bytes(
        encode_image(make_pixels(width, height, seed), format, **options), f"image/{format.lower()}"
    )


def make_square(color: tuple[int, int, int], side: int = 100) -> Media:
    return Media.from_bytes(encode_image(np.full((side, side, 3), color, np.uint8)), "image/png")


def make_png_header(width: int, height: int) -> bytes:
    """A PNG that claims any size in a few bytes; its data is one compressed row of zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(bytes(width + 1))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def make_animation(format: str) -> bytes:
    frames = [Image.fromarray(make_pixels(8, 8, seed)) for seed in range(3)]
    buffer = BytesIO()
    frames[0].save(buffer, format, save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def write_model_config(directory: Path, config: dict, image_processor: dict, processor: dict | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(image_processor))
    if processor is not None:
        (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory


def write_idefics3_config(directory: Path, *, tile: int = 32, longest_edge: int = 64, splits: bool = True) -> Path:
    """Tiles of 32 pixels with patches of 8 pixels, which are merged 2 × 2: 4 tokens per tile."""
    config = {
        "model_type": "smolvlm",
        "image_token_id": 260,
        "scale_factor": 2,
        "vision_config": {"image_size": tile, "patch_size": 8},
    }
    image_processor = {
        "do_image_splitting": splits,
        "size": {"longest_edge": longest_edge},
        "max_image_size": {"longest_edge": tile},
    }
    return write_model_config(directory, config, image_processor)


def write_qwen3_vl_config(directory: Path, min_pixels: int = 1024, max_pixels: int = 65536) -> Path:
    config = {"model_type": "qwen3_vl", "image_token_id": 260, "vision_config": {"spatial_merge_size": 2}}
    image_processor = {
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return write_model_config(directory, config, image_processor)


# Directories of vision models: the tokenizer of `tiny` with image tokens, and three templates. `smolvlm` has a template
# after SmolVLM's, which requires parts and writes another opening before an image, `qwen3_vl` one after Qwen3-VL's, and
# `tiny` one that also accepts plain texts, with four tokens per image.
TINY = Path(ramify.__file__).parent / "model" / "bundled" / "tiny"
IDEFICS3_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TILE_TOKENS = [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]
QWEN_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]

PARTS = """
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}{{ IMAGE if part.type == 'image' else part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
"""
CHAT = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ show(message.content) }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TEMPLATES = {
    "tiny": PARTS.replace("IMAGE", "'<image>'") + CHAT,
    "qwen3_vl": PARTS.replace("IMAGE", "'<|vision_start|><|image_pad|><|vision_end|>'") + CHAT,
    "smolvlm": SMOLVLM,
}


def write_vision_directory(directory: Path, kind: str) -> Path:
    """Write the model of one kind and return its directory."""
    if kind == "qwen3_vl":
        write_qwen3_vl_config(directory)
        tokens = QWEN_TOKENS
    else:
        write_idefics3_config(directory, splits=kind == "smolvlm")
        tokens = [*IDEFICS3_TOKENS, *TILE_TOKENS]
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    config["image_token_id"] = tokenizer.token_to_id("<|image_pad|>" if kind == "qwen3_vl" else "<image>")
    (directory / "config.json").write_text(json.dumps(config))
    end = "<end_of_utterance>" if kind == "smolvlm" else "<|im_end|>"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "chat_template": TEMPLATES[kind]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
