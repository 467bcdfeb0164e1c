"""The SQL tables that every run has, and the record of one rollout.

A record holds what lists and statistics need, so that printing a mean does not decode a thousand traces. A rollout with
the id of an earlier one replaces it; the frame of the earlier one stays in its segment, unused.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from ramify.core.errors import RunDamaged

ROLLOUT_TABLES = """
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS segments (number INTEGER PRIMARY KEY, length INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts (
    id TEXT PRIMARY KEY,
    source TEXT NOT NULL,
    task TEXT NOT NULL,
    repetition INTEGER NOT NULL,
    reward REAL,
    failure TEXT,
    summary BLOB NOT NULL,
    segment INTEGER NOT NULL,
    start INTEGER NOT NULL,
    stop INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS rollouts_by_task ON rollouts (source, task, repetition);
CREATE TABLE IF NOT EXISTS tasks (
    source TEXT NOT NULL, number INTEGER NOT NULL, content TEXT NOT NULL, PRIMARY KEY (source, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (time REAL NOT NULL, kind TEXT NOT NULL, fields BLOB NOT NULL);
"""


class FrameLocation(NamedTuple):
    """The location of a frame: bytes [start, stop) of a segment."""

    segment: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout in the index.

    `task` is the identity of its task, `repetition` counts the rollouts of one task. `failure` is the name of the
    system failure that ended it, if any: such a rollout counts as missing.
    """

    id: str
    task: str
    repetition: int = 0
    source: str = ""
    reward: float | None = None
    failure: str | None = None
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    """Counts, timing and metrics as plain data, from `ramify.run.store.summary`."""


_COLUMNS = "id, task, repetition, source, reward, failure, summary"


def insert_rollout(
    connection: sqlite3.Connection, record: RolloutRecord, summary: bytes, location: FrameLocation
) -> None:
    """Insert the record, or replace the one with its id."""
    values = (
        record.id,
        record.task,
        record.repetition,
        record.source,
        record.reward,
        record.failure,
        summary,
        *location,
    )
    placeholders = ", ".join("?" * len(values))
    connection.execute(
        f"INSERT OR REPLACE INTO rollouts ({_COLUMNS}, segment, start, stop) VALUES ({placeholders})", values
    )


def select_rollouts(connection: sqlite3.Connection, condition: str, *values: str | int) -> Iterator[RolloutRecord]:
    """Yield the records that meet an SQL condition, which may end with an order and a limit. Raises RunDamaged."""
    for id, *columns, summary in connection.execute(f"SELECT {_COLUMNS} FROM rollouts WHERE {condition}", values):
        try:
            yield RolloutRecord(id, *columns, summary=msgspec.msgpack.decode(summary))
        except msgspec.DecodeError as error:
            raise RunDamaged(f"rollout {id}: its summary in the index cannot be decoded: {error}") from error
