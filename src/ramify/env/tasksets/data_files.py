"""Reads the rows of data files: jsonl, parquet, arrow, csv and json, or a directory of them.

A Hugging Face dataset is a directory of such files, saved by `datasets` or downloaded. A dataset id is looked up in the
local cache and never downloaded. The package `datasets` is not needed.
"""

import csv
import json
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ramify.core.errors import ConfigInvalid

DataRow = dict[str, Any]
MAX_FIELD_CHARS = 2**30  # of a csv field; the default of the csv module is 131,072
METADATA_FILES = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
)  # `datasets` writes these


def read_rows(name: str, part: str | None = None) -> Iterator[DataRow]:
    """Yield the rows of a file, a directory or a dataset id; `part` selects the files of one part, such as `test`."""
    for file in _find_files(name, part):
        try:
            yield from READERS[file.suffix](file)
        except (ValueError, OSError) as error:  # pyarrow's exceptions are subclasses of these
            raise ConfigInvalid(f"dataset: {file} cannot be read: {error}") from error


def _find_files(name: str, part: str | None) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in READERS:
            raise ConfigInvalid(f"dataset: {path} is not one of {', '.join(READERS)}")
        return [path]
    directory = path if path.is_dir() else _find_in_hf_cache(name)
    readable = sorted(file for file in directory.rglob("*") if file.suffix in READERS and file.is_file())
    # `datasets` writes caches, which repeat the rows, and metadata in json and csv beside files of other formats.
    files = [
        file
        for file in readable
        if not (file.name.startswith("cache-") and (file.parent / "state.json").is_file())
        and file.name not in METADATA_FILES
    ]
    data_files = [file for file in files if file.suffix not in (".csv", ".json")] or files
    selected = [file for file in data_files if part is None or part in _part_names(file, directory)]
    if not selected:
        parts = ", ".join(sorted({word for file in data_files for word in _part_names(file, directory)}))
        missing = f"part {part!r}" if part else "data files"
        raise ConfigInvalid(f"dataset: {name} has no {missing}; it has {parts or 'no data files'}")
    return selected


def _part_names(file: Path, directory: Path) -> set[str]:
    """Return the names of a file's part: `train` for `train/data-0.arrow`, `train-0-of-2.parquet` and `train.jsonl`."""
    return {*file.relative_to(directory).parts[:-1], file.stem.split("-")[0], file.stem}


def _find_in_hf_cache(name: str) -> Path:
    """Return the directory of a dataset's main revision in the local Hugging Face cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    entry = cache / f"datasets--{name.replace('/', '--')}"
    main = entry / "refs" / "main"
    snapshot = entry / "snapshots" / main.read_text().strip() if main.is_file() else None
    if snapshot is None or not snapshot.is_dir():
        raise ConfigInvalid(
            f"dataset: {name} is not a file or directory, and {entry} does not exist. Datasets are not downloaded: "
            f"run `hf download --repo-type dataset {name}`, or give a path"
        )
    return snapshot


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
    if not isinstance(content, list):
        kind = f"an object with the keys {', '.join(content)}" if isinstance(content, dict) else type(content).__name__
        raise ConfigInvalid(f"dataset: {file} has no rows: expected a list of objects, found {kind:.200}")
    for number, row in enumerate(content, 1):
        if not isinstance(row, dict):
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
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _import_pyarrow(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigInvalid("dataset: parquet and arrow files need pyarrow: pip install 'ramify[parquet]'") from error


READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".csv": _read_csv,
    ".json": _read_json,
}
