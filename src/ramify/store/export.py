"""A run in the forms other tools read: one line or one record per trace, in the order of tasks and repetitions.

Messages, counts and scores, no token ids: those stay in the run, whose binary form is the one that can be trained on.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigInvalid
from ramify.store.run_store import RunStore
from ramify.trace.json_view import to_dict

EXPORT_FORMATS = ("jsonl", "parquet")
ReportProgress = Callable[[int, int], None]

ROWS_PER_WRITE = 256  # traces in memory at once
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
    """Write the run to `path`, whole or not at all, and return the number of traces.

    `report` is called after every rollout with the number of those that are done and of all.
    """
    if format not in EXPORT_FORMATS:
        raise ConfigInvalid(f"--to: expected {' or '.join(EXPORT_FORMATS)}, got {format!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        count = (_write_jsonl if format == "jsonl" else _write_parquet)(store, temporary, report_progress)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def iter_records(store: RunStore, report_progress: ReportProgress | None = None) -> Iterator[dict[str, Any]]:
    """Each trace as plain data, with the rollout it belongs to. `task` is the task's identity, `task_data` the task."""
    ((total,),) = store.select("SELECT count(*) FROM rollouts")
    for done, row in enumerate(store.iter_rollouts(), start=1):
        for trace in store.read_traces(row.id):
            found = to_dict(trace)
            found["task_data"] = found.pop("task", {})
            yield {"rollout": row.id, "source": row.source, "task": row.task, "repetition": row.repetition, **found}
        if report_progress is not None:
            report_progress(done, total)


def _write_jsonl(store: RunStore, path: Path, report_progress: ReportProgress | None) -> int:
    count = 0
    with path.open("wb") as file:
        for record in iter_records(store, report_progress):
            file.write(msgspec.json.encode(record) + b"\n")
            count += 1
    return count


def _write_parquet(store: RunStore, path: Path, report_progress: ReportProgress | None) -> int:
    """Flat fields as columns; nested ones as JSON text, because no two environments nest alike."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigInvalid("--to parquet needs pyarrow: pip install 'ramify[parquet]'") from None
    fields = [
        *((name, pa.string()) for name in STRING_COLUMNS),
        *((name, pa.int64()) for name in INT_COLUMNS),
        ("reward", pa.float64()),
    ]
    schema, count = pa.schema(fields), 0
    with pq.ParquetWriter(path, schema) as writer:
        batch: list[dict[str, Any]] = []
        for record in iter_records(store, report_progress):
            count += 1
            batch.append({name: _to_cell(name, record.get(name)) for name in schema.names})
            if len(batch) == ROWS_PER_WRITE:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, schema))
    return count


def _to_cell(column: str, value: Any) -> Any:
    if column in JSON_COLUMNS:
        return msgspec.json.encode(value).decode()
    return (value or 0) if column in INT_COLUMNS else (value or "") if column in STRING_COLUMNS else value
