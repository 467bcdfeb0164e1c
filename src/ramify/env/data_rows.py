"""Rows of data files, and the prompt of a row.

The files are jsonl, parquet, arrow, csv and json, or a directory of them. A Hugging Face dataset is a directory of such
files, saved by `datasets` or downloaded. The package `datasets` is not needed.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ramify.core.config.schema import is_dict, is_list
from ramify.core.errors import ConfigInvalid, ImageInvalid, RequestInvalid
from ramify.env.data_config import DataColumnsConfig, DataFilesConfig
from ramify.env.data_selection import find_data_directory, list_data_files
from ramify.infer.dialects.media import (
    IMAGE_PART_TYPES,
    ReadUrl,
    build_dataset_reader,
    find_image_value,
    media_to_url,
    read_image,
)

DataRow = dict[str, Any]
MAX_FIELD_CHARS = 2**30  # of a csv field; the default of the csv module is 131,072
Prompt = str | tuple[dict[str, Any], ...]


def read_rows(source: DataFilesConfig | str) -> Iterator[DataRow]:
    """Yield the rows of `source`, or of the path that it is: a file, a directory or a cached dataset of the hub."""
    config = DataFilesConfig(path=source) if isinstance(source, str) else source
    for file in list_data_files(config):
        try:
            yield from READERS[file.suffix](file)
        except (ValueError, OSError) as error:  # pyarrow's exceptions are subclasses of these
            raise ConfigInvalid(f"dataset: {file} cannot be read: {error}") from error


def count_rows(config: DataFilesConfig) -> int:
    """Return the number of rows."""
    total = 0
    for file in list_data_files(config):
        if file.suffix == ".parquet":
            total += _import_pyarrow("pyarrow.parquet").ParquetFile(file).metadata.num_rows
        elif file.suffix == ".jsonl":
            with file.open("rb") as lines:
                total += sum(bool(line.strip()) for line in lines)
        else:
            total += sum(1 for _ in READERS[file.suffix](file))
    return total


def _read_jsonl(file: Path) -> Iterator[DataRow]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigInvalid(f"dataset: {file}:{number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigInvalid(f"dataset: {file}:{number} is not a JSON object")
            yield row


def _read_json(file: Path) -> Iterator[DataRow]:
    """Read a list of objects, or one object per line."""
    text = file.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text)
    except ValueError as error:
        if text.lstrip().startswith("{"):  # one object per line
            yield from _read_jsonl(file)
            return
        raise ConfigInvalid(f"dataset: {file} is not JSON: {error}") from error
    if not is_list(content):
        kind = f"an object with the keys {', '.join(content)}" if is_dict(content) else type(content).__name__
        raise ConfigInvalid(f"dataset: {file} has no rows: expected a list of objects, found {kind:.200}")
    for number, row in enumerate(content, 1):
        if not is_dict(row):
            raise ConfigInvalid(f"dataset: {file}: row {number} is not an object")
        yield row


def _read_csv(file: Path) -> Iterator[DataRow]:
    """Read comma-separated text fields; the first line names the columns."""
    csv.field_size_limit(MAX_FIELD_CHARS)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, None)
            if not header:
                raise ConfigInvalid(f"dataset: {file} is empty: its first line must name the columns")
            if repeated := [name for name in header if header.count(name) > 1]:
                raise ConfigInvalid(f"dataset: {file} has the column {repeated[0]!r} twice")
            for fields in reader:
                if len(fields) not in (0, len(header)):
                    count = f"{len(fields)} field{'s' if len(fields) != 1 else ''}"
                    raise ConfigInvalid(f"dataset: {file}:{reader.line_num} has {count}, the header has {len(header)}")
                if fields:
                    yield dict(zip(header, fields))
        except csv.Error as error:
            raise ConfigInvalid(f"dataset: {file}:{reader.line_num} is not CSV: {error}") from error


def _read_parquet(file: Path) -> Iterator[DataRow]:
    for batch in _import_pyarrow("pyarrow.parquet").ParquetFile(file).iter_batches():
        yield from map(_clean_row, batch.to_pylist())


def _read_arrow(file: Path) -> Iterator[DataRow]:
    with file.open("rb") as stream:
        for batch in _import_pyarrow("pyarrow.ipc").open_stream(stream):
            yield from map(_clean_row, batch.to_pylist())


def _clean_row(columns: DataRow) -> DataRow:
    """Return a row without the null entries that arrow adds to nested objects."""
    return {name: _drop_nulls(value) for name, value in columns.items()}


def _drop_nulls(value: Any) -> Any:
    if is_dict(value):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if is_list(value) else value


def _import_pyarrow(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        advice = "pip install 'ramify[local]', or 'ramify[parquet]' without an engine"
        raise ConfigInvalid(f"dataset: parquet and arrow files need pyarrow: {advice}") from error


READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".csv": _read_csv,
    ".json": _read_json,
}


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
