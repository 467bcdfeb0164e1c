"""Reads the rows of data files: jsonl, parquet, arrow, csv and json, or a directory of them.

A Hugging Face dataset is a directory of such files, saved by `datasets` or downloaded. The package `datasets` is not
needed.
"""

import csv
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ramify.core.config.schema import is_dict, is_list
from ramify.core.errors import ConfigInvalid
from ramify.env.data_config import DataFilesConfig
from ramify.env.data_selection import list_data_files

DataRow = dict[str, Any]
MAX_FIELD_CHARS = 2**30  # of a csv field; the default of the csv module is 131,072


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
