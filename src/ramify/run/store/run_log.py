"""The metrics and events of a run, in append-only tables.

Writes are queued and not awaited: losing the last points in a crash is acceptable. If a step is run again, readers see
its last value; earlier rows stay in the table.
"""

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.run.store.run_store import RunStore, TableChange

NAN_TEXT = "nan"  # SQLite stores NaN as NULL, which the column does not allow


class MetricPoint(NamedTuple):
    """The value of one metric at one step."""

    step: int
    name: str
    value: float


class RunEvent(NamedTuple):
    """An event of a run: its Unix time, its kind, and plain data."""

    time: float
    kind: str
    fields: dict[str, Any]

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> "RunEvent":
        """Return the event of a row of the table."""
        seconds, kind, fields = row
        return cls(seconds, kind, msgspec.msgpack.decode(fields))


def read_metrics_by_step(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of a finished run, one dict for each step: `{"step": 3, "train/loss": 0.2, ...}`."""
    steps: dict[int, dict[str, Any]] = {}
    with RunStore.open(path, write=False) as store:
        for step, name, value in RunLog(store).metrics():
            steps.setdefault(step, {"step": step})[name] = value
    return list(steps.values())


def build_event_change(kind: str, **fields: Any) -> TableChange:
    """Return the change of the tables that logs an event, for a transaction that changes other tables too."""
    query, row = "INSERT INTO events VALUES (?, ?, ?)", (time.time(), kind, msgspec.msgpack.encode(fields))
    return lambda connection: connection.execute(query, row)


def build_eval_removal(step: int) -> TableChange:
    """Return the change of the tables that removes the metrics of evals after a step, so that they are run again."""
    query = "DELETE FROM metrics WHERE name GLOB 'eval/*' AND step > ?"
    return lambda connection: connection.execute(query, (step,))


class RunLog:
    """Writes and reads the metrics and events of a run."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def log_metrics(self, step: int, values: Mapping[str, float]) -> "Future[None]":
        """Log the values of one step by name. NaN is stored too, because it is what one looks for when debugging."""
        rows = [(step, name, NAN_TEXT if math.isnan(value) else float(value)) for name, value in values.items()]
        query = "INSERT INTO metrics VALUES (?, ?, ?)"
        return self._store.submit_change(lambda connection: connection.executemany(query, rows))

    def log_event(self, kind: str, **fields: Any) -> "Future[None]":
        """Log an event with plain data as its fields."""
        return self._store.submit_change(build_event_change(kind, **fields))

    def metrics(self, glob: str = "*") -> list[MetricPoint]:
        """Return the last value of every (step, name) whose name matches `glob`, ordered by step and name."""
        query = """SELECT step, name, value FROM metrics WHERE rowid IN (
            SELECT max(rowid) FROM metrics WHERE name GLOB ? GROUP BY step, name) ORDER BY step, name"""
        values = (glob.replace("[!", "[^"),)  # SQLite negates a set of characters with ^
        return self._store.select_records(lambda row: MetricPoint(row[0], row[1], float(row[2])), query, values)

    def values_by_step(self, name: str | None) -> dict[int, float]:
        """Return the last value of one metric at each step; nothing for None."""
        query = "SELECT step, value FROM metrics WHERE name = ? ORDER BY rowid"
        rows: list[tuple[Any, ...]] = [] if name is None else self._store.select(query, (name,))
        return {step: float(value) for step, value in rows}

    def events(self, kind: str | None = None) -> list[RunEvent]:
        """Return all events, or the events of one kind, in order."""
        where, values = ("", ()) if kind is None else ("WHERE kind = ?", (kind,))
        query = f"SELECT time, kind, fields FROM events {where} ORDER BY rowid"
        return self._store.select_records(RunEvent.from_row, query, values)
