"""Metrics and events of a run: appended, never changed.

Nobody waits for them: a metric that is lost with its process costs a point of a curve, so these calls only queue. What
a step that was done again says later counts; what it said first stays in the table.
"""

import math
import sqlite3
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.store.run_store import RunStore

NAN_TEXT = "nan"  # SQLite has no such number, and would refuse the row and all that came with it


class MetricPoint(NamedTuple):
    """One point of a curve."""

    step: int
    name: str
    value: float


class RunEvent(NamedTuple):
    """Something that happened, at Unix seconds `time`."""

    time: float
    kind: str
    fields: dict[str, Any]


def read_metrics_by_step(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run that is over, one dict for each step: `{"step": 3, "train/loss": 0.2, ...}`."""
    steps: dict[int, dict[str, Any]] = {}
    with RunStore.open(path, write=False) as store:
        for step, name, value in RunLog(store).metrics():
            steps.setdefault(step, {"step": step})[name] = value
    return list(steps.values())


class RunLog:
    """Beside the ledger, in the same tables and behind the same writer."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def log_metrics(self, step: int, values: Mapping[str, float]) -> "Future[None]":
        """Values by name, of one step. Those that are no number count too: they are what one looks for."""
        rows = [(step, name, NAN_TEXT if math.isnan(value) else float(value)) for name, value in values.items()]

        def apply(connection: sqlite3.Connection, _: object) -> None:
            connection.executemany("INSERT INTO metrics VALUES (?, ?, ?)", rows)

        return self._store.submit_change(apply)

    def log_event(self, kind: str, **fields: Any) -> "Future[None]":
        """An event with its fields, plain data."""
        row = (time.time(), kind, msgspec.msgpack.encode(fields))
        return self._store.submit_change(
            lambda connection, _: connection.execute("INSERT INTO events VALUES (?, ?, ?)", row) and None
        )

    def metrics(self, glob: str = "*") -> list[MetricPoint]:
        """The last value of every (step, name) whose name matches."""
        query = """SELECT step, name, value FROM metrics WHERE rowid IN (
            SELECT max(rowid) FROM metrics WHERE name GLOB ? GROUP BY step, name) ORDER BY step, name"""
        found = self._store.select(query, (glob,))
        return [MetricPoint(step, name, float(value)) for step, name, value in found]

    def events(self, kind: str | None = None) -> list[RunEvent]:
        """All events, or those of one kind, in order."""
        where, values = ("", ()) if kind is None else ("WHERE kind = ?", (kind,))
        rows = self._store.select(f"SELECT time, kind, fields FROM events {where} ORDER BY rowid", values)
        return [RunEvent(at, name, msgspec.msgpack.decode(fields)) for at, name, fields in rows]
