"""The small files of a Hugging Face model directory that say how to talk to the model.

The same fact may stand in several of them, written by different versions of different tools. This module reads all and
settles the order once: `chat_template.jinja` over `tokenizer_config.json`, and every id that any of them calls an end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ramify.errors import ConfigInvalid

DEFAULT_TEMPLATE = "default"
TOOL_USE_TEMPLATE = "tool_use"  # some models have a second template for conversations with tools
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Templates by name, the texts of the named tokens (`bos_token`, ...), and the ids that end a reply."""

    directory: Path
    templates: Mapping[str, str] = field(default_factory=dict[str, str])
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, directory: Path) -> ModelFiles:
        if not directory.is_dir():
            raise ConfigInvalid(f"model: there is no directory {directory}")
        config = _read_json(directory / "tokenizer_config.json")
        named = {**_read_json(directory / "special_tokens_map.json"), **config}
        return cls(
            directory,
            _load_templates(directory, config.get("chat_template")),
            {name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(named.get(name))) is not None},
            _load_eos_ids(directory),
        )


def _load_templates(directory: Path, config_value: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    if isinstance(config_value, str):
        found[DEFAULT_TEMPLATE] = config_value
    elif config_value:
        entries: list[dict[str, str]] = config_value
        found |= {entry["name"]: entry["template"] for entry in entries}
    processor = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(processor, str):
        found[DEFAULT_TEMPLATE] = processor
    for file in sorted(directory.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = file.read_text("utf-8")
    alone = directory / "chat_template.jinja"
    if alone.exists():
        found[DEFAULT_TEMPLATE] = alone.read_text("utf-8")
    return found


def _load_eos_ids(directory: Path) -> tuple[int, ...]:
    """The generation config decides; the model config speaks where it is silent."""
    for name in ("generation_config.json", "config.json"):
        ids: int | list[int] | None = _read_json(directory / name).get("eos_token_id")
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def _token_text(value: Any) -> str | None:
    """A token is written as its text, or as a table that holds it."""
    text: Any = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        value: Any = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ConfigInvalid(f"model: {file} is not JSON: {error}") from error
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
