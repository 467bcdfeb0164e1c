"""Directories of vision models, without weights: the tokenizer of `tiny` with image tokens, and three templates.

`smolvlm` has a template after SmolVLM's, which requires parts and writes another opening before an image, `qwen3_vl`
one after Qwen3-VL's, and `tiny` one that also accepts plain texts, with four tokens per image.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

import ramify
from tests.images.samples import write_idefics3_config, write_qwen3_vl_config

TINY = Path(ramify.__file__).parent / "models" / "tiny"
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


def write_vision_model(directory: Path, kind: str) -> Path:
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
