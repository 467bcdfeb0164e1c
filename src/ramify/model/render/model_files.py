"""The files of a Hugging Face model directory that rendering needs: chat templates, special tokens, end-of-text ids.

Several files may hold the same setting, written by different versions of different tools. This module defines the
precedence once: `chat_template.jinja` over `chat_template.json` over `tokenizer_config.json`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ramify.core.errors import ConfigInvalid
from ramify.model.images.image_family import read_model_json

DEFAULT_TEMPLATE = "default"
TOOL_USE_TEMPLATE = "tool_use"  # a second template that some models have for conversations with tools
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Templates by name, the texts of the special tokens (`bos_token`, ...), and the ids that end a reply."""

    directory: Path
    templates: Mapping[str, str] = field(default_factory=dict[str, str])
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, directory: Path) -> "ModelFiles":
        """Read the files of a model directory."""
        if not directory.is_dir():
            raise ConfigInvalid(f"model: {directory} is not a directory")
        config = read_model_json(directory / "tokenizer_config.json")
        token_entries = {**read_model_json(directory / "special_tokens_map.json"), **config}
        return cls(
            directory,
            _load_templates(directory, config.get("chat_template")),
            {name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(token_entries.get(name))) is not None},
            _load_eos_ids(directory),
        )


def _load_templates(directory: Path, config_value: Any) -> dict[str, str]:
    templates: dict[str, str] = {}
    if isinstance(config_value, str):
        templates[DEFAULT_TEMPLATE] = config_value
    elif config_value:
        try:
            templates |= {str(entry["name"]): str(entry["template"]) for entry in config_value}
        except (KeyError, TypeError) as error:
            raise ConfigInvalid(
                f"model: chat_template in {directory / 'tokenizer_config.json'} is {str(config_value)[:80]}, expected "
                "a text, or a list of tables with name and template"
            ) from error
    processor_template = read_model_json(directory / "chat_template.json").get("chat_template")
    if isinstance(processor_template, str):
        templates[DEFAULT_TEMPLATE] = processor_template
    for file in sorted(directory.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = file.read_text("utf-8")
    template_file = directory / "chat_template.jinja"
    if template_file.exists():
        templates[DEFAULT_TEMPLATE] = template_file.read_text("utf-8")
    return templates


def _load_eos_ids(directory: Path) -> tuple[int, ...]:
    """Return the end-of-text ids from the generation config, or else from the model config."""
    for name in ("generation_config.json", "config.json"):
        value: Any = read_model_json(directory / name).get("eos_token_id")
        if value is not None:
            ids = cast("list[Any]", value) if isinstance(value, list) else [value]
            if not all(isinstance(id, int) and 0 <= id < 2**31 for id in ids):
                raise ConfigInvalid(f"model: eos_token_id in {directory / name} is {value!r}, expected token ids")
            return tuple(ids)
    return ()


def _token_text(value: Any) -> str | None:
    """Return the text of a token, which is stored as a string or as an object with the key `content`."""
    text: Any = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
