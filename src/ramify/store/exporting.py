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
from ramify.store.store import RunStore
from ramify.trace.json_view import to_dict

FORMATS = ("jsonl", "parquet")
ReportProgress = Callable[[int, int], None]

BATCH = 256  # traces in memory at once
NESTED = (
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
TEXT = ("rollout", "source", "task", "id", "episode", "group", "agent", "env", "stop", *NESTED)
WHOLE = ("repetition", "attempt", "schema")


def export(store: RunStore, to: str, path: Path, report: ReportProgress | None = None) -> int:
    """Write the run to `path`, whole or not at all, and return the number of traces.

    `report` is called after every rollout with the number of those that are done and of all.
    """
    if to not in FORMATS:
        raise ConfigInvalid(f"--to: expected {' or '.join(FORMATS)}, got {to!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        count = (_jsonl if to == "jsonl" else _parquet)(store, temporary, report)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def records(store: RunStore, report: ReportProgress | None = None) -> Iterator[dict[str, Any]]:
    """Each trace as plain data, with the rollout it belongs to. `task` is the task's identity, `task_data` the task."""
    ((total,),) = store.select("SELECT count(*) FROM rollouts")
    for done, row in enumerate(store.iterate_rows(), start=1):
        for trace in store.read(row.id):
            found = to_dict(trace)
            found["task_data"] = found.pop("task", {})
            yield {"rollout": row.id, "source": row.source, "task": row.task, "repetition": row.repetition, **found}
        if report is not None:
            report(done, total)


def _jsonl(store: RunStore, path: Path, report: ReportProgress | None) -> int:
    count = 0
    with path.open("wb") as file:
        for record in records(store, report):
            file.write(msgspec.json.encode(record) + b"\n")
            count += 1
    return count


def _parquet(store: RunStore, path: Path, report: ReportProgress | None) -> int:
    """Flat fields as columns; nested ones as JSON text, because no two environments nest alike."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigInvalid("--to parquet needs pyarrow: pip install 'ramify[parquet]'") from None
    fields = [
        *((name, pa.string()) for name in TEXT),
        *((name, pa.int64()) for name in WHOLE),
        ("reward", pa.float64()),
    ]
    schema, count = pa.schema(fields), 0
    with pq.ParquetWriter(path, schema) as writer:
        batch: list[dict[str, Any]] = []
        for record in records(store, report):
            count += 1
            batch.append({name: _cell(name, record.get(name)) for name in schema.names})
            if len(batch) == BATCH:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, schema))
    return count


def _cell(name: str, value: Any) -> Any:
    if name in NESTED:
        return msgspec.json.encode(value).decode()
    return (value or 0) if name in WHOLE else (value or "") if name in TEXT else value
