"""Prompts of rows: text, or messages with the images of the row in them."""

from collections.abc import Iterator, Mapping
from typing import Any

from ramify.core.config.schema import is_dict, is_list
from ramify.core.errors import ConfigInvalid, ImageInvalid, RequestInvalid
from ramify.env.data_config import DataColumnsConfig
from ramify.env.data_selection import find_data_directory
from ramify.infer.dialects.media import (
    IMAGE_PART_TYPES,
    ReadUrl,
    build_dataset_reader,
    find_image_value,
    media_to_url,
    read_image,
)

Prompt = str | tuple[dict[str, Any], ...]


def read_prompt(row: Mapping[str, Any], config: DataColumnsConfig, row_number: int) -> Prompt:
    """Return the prompt of a `row`, with the images of its column in the parts that refer to them.

    `config` names the columns, and `row_number` is for messages. Raises ConfigInvalid.
    """
    if config.prompt_column not in row:
        listed = ", ".join(row)
        raise ConfigInvalid(f"dataset: row {row_number} has no column {config.prompt_column!r}; it has {listed}")
    prompt, column = _parse_prompt(row[config.prompt_column], row_number), config.images_column
    if row.get(column) and not _has_images(prompt):
        problem = f"row {row_number} has images in its column {column!r}, but its prompt refers to none"
        raise ConfigInvalid(f"dataset: {problem}; use messages with parts of type image, or another images_column")
    if not _has_images(prompt) or isinstance(prompt, str):
        return prompt
    read_url = build_dataset_reader(find_data_directory(config))
    try:
        return _insert_images(prompt, iter(row.get(column) or ()), read_url)
    except (ImageInvalid, RequestInvalid) as error:
        raise ConfigInvalid(f"dataset: row {row_number}: {error.message}") from error


def _parse_prompt(value: Any, row_number: int) -> Prompt:
    if isinstance(value, str):
        return value
    if is_list(value) and value and all(map(is_dict, value)):
        return tuple(value)
    raise ConfigInvalid(f"dataset: the prompt of row {row_number} is neither text nor messages, but {value!r:.80}")


def _insert_images(
    prompt: tuple[dict[str, Any], ...], images: Iterator[Any], read_url: ReadUrl
) -> tuple[dict[str, Any], ...]:
    """Return the messages with the images of the row in the parts that hold no image, as data URLs."""

    def insert(part: Any) -> Any:
        # Structs of Parquet have all fields, some of them None.
        if not (is_dict(part) and part.get("type") in IMAGE_PART_TYPES) or find_image_value(part) is not None:
            return part
        if (image := next(images, None)) is None:
            raise RequestInvalid("a message has more images than its row; set images_column, or put them into parts")
        return {"type": "image_url", "image_url": {"url": media_to_url(read_image(image, read_url))}}

    return tuple(
        {**message, "content": [insert(part) for part in content]}
        if is_list(content := message.get("content"))
        else message
        for message in prompt
    )


def _has_images(prompt: Prompt) -> bool:
    contents: list[Any] = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    parts: list[Any] = [part for content in contents if is_list(content) for part in content]
    return any(is_dict(part) and part.get("type") in IMAGE_PART_TYPES for part in parts)
