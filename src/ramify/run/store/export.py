"""Export of a run as JSONL or Parquet: one record per trace, in the order of tasks and repetitions.

Records have messages, counts and scores, but no token ids: only the run's own binary form can be trained on. An image
is named by its hash and its file in the run.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from ramify.core.errors import ConfigInvalid
from ramify.core.files import replace_file
from ramify.run.store.image_store import elide_data_urls
from ramify.run.store.run_store import RunStore
from ramify.trace.json_view import to_dict

EXPORT_FORMATS = ("jsonl", "parquet")
ReportProgress = Callable[[int, int], None]

ROWS_PER_WRITE = 256  # bounds the traces in memory
JSON_COLUMNS = (
    "task_data",
    "rewards",
    "metrics",
    "info",
    "errors",
    "timing",
    "harness",
    "runtime",
    "sampler",
    "nodes",
    "media",
)
STRING_COLUMNS = ("rollout", "source", "task", "id", "episode", "group", "agent", "env", "stop", *JSON_COLUMNS)
INT_COLUMNS = ("repetition", "attempt", "schema")


def export_run(store: RunStore, format: str, path: Path, report_progress: ReportProgress | None = None) -> int:
    """Write the run to `path` atomically and return the number of traces.

    `report_progress` is called after every rollout with the number of finished rollouts and of all.
    """
    if format not in EXPORT_FORMATS:
        raise ConfigInvalid(f"--to: expected {' or '.join(EXPORT_FORMATS)}, got {format!r}")
    write = _write_jsonl if format == "jsonl" else _write_parquet
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as partial_path:
        return write(iter_records(store, report_progress), partial_path)


def iter_records(store: RunStore, report_progress: ReportProgress | None = None) -> Iterator[dict[str, Any]]:
    """Yield each trace as plain data, with its rollout. `task` is the task's identity, `task_data` the task itself."""
    ((total,),) = store.select("SELECT count(*) FROM rollouts")
    for num_done, rollout in enumerate(store.iter_rollouts(), start=1):
        for trace in store.read_traces(rollout.id):
            fields = elide_data_urls(to_dict(trace))
            fields["task_data"] = fields.pop("task", {})
            for entry, media in zip(fields["media"], trace.graph.media):
                del entry["bytes"]  # of those that the trace itself holds
                if (file := store.images.path(media)).exists():
                    entry["file"] = str(file.relative_to(store.path))
            yield {
                "rollout": rollout.id,
                "source": rollout.source,
                "task": rollout.task,
                "repetition": rollout.repetition,
                **fields,
            }
        if report_progress is not None:
            report_progress(num_done, total)


def _write_jsonl(records: Iterable[dict[str, Any]], path: Path) -> int:
    count = 0
    with path.open("wb") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")
            count += 1
    return count


def _write_parquet(records: Iterable[dict[str, Any]], path: Path) -> int:
    """Write flat fields as columns and nested fields as JSON text, because environments nest them differently."""
    try:
        pa: Any = import_module("pyarrow")
        pq: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigInvalid("--to parquet needs pyarrow; install it with: pip install 'ramify[parquet]'") from None
    fields = [
        *((name, pa.string()) for name in STRING_COLUMNS),
        *((name, pa.int64()) for name in INT_COLUMNS),
        ("reward", pa.float64()),
    ]
    schema, count = pa.schema(fields), 0
    with pq.ParquetWriter(path, schema) as writer:
        rows: list[dict[str, Any]] = []
        for record in records:
            count += 1
            rows.append({name: _to_cell(name, record.get(name)) for name in schema.names})
            if len(rows) == ROWS_PER_WRITE:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, schema))
    return count


def _to_cell(column: str, value: Any) -> Any:
    if column in JSON_COLUMNS:
        return msgspec.json.encode(value).decode()
    return (value or 0) if column in INT_COLUMNS else (value or "") if column in STRING_COLUMNS else value
