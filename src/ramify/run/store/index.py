"""The tables that every run has in its index, `run.sqlite`, and checks that the index belongs to the files beside it.

The record of a rollout holds what lists and statistics need, so that printing a mean does not decode a thousand traces.
A rollout with the id of an earlier one replaces it; the frame of the earlier one stays in its segment, unused.

When a run is opened for writing, everything that the index does not list is removed, because it is an unfinished write.
If the index was lost or emptied, that would remove all traces and checkpoints. So a directory that holds results but
whose index lists nothing is refused, before anything in it is changed.

SQLite keeps no checksums of its pages. So a writer that closes the run stores a checksum of the file beside it,
and the next writer removes it. A run whose writer was killed has none.
"""

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.core.errors import RamifyError, RunDamaged
from ramify.core.files import fsync_path, replace_file, write_and_fsync
from ramify.core.names import format_count

DATABASE_NAME, TRACES_DIR, WEIGHTS_GLOB = "run.sqlite", "traces", "weights/*/*.safetensors"
CHECKSUM_NAME = f"{DATABASE_NAME}.sha256"  # in the format of sha256sum
MERGE_TIMEOUT = 1.0  # seconds to wait for readers when the write-ahead log is merged into the database
RECOVERY_HINT = (
    f"Restore the file (and {DATABASE_NAME}-wal and {CHECKSUM_NAME}, if the copy has them) from a copy of the run, or "
    "repeat the command with --fresh, which moves the directory aside and starts a new run"
)
USE_WEIGHTS_HINT = ". Weights in it can still be used as a model, with -m PATH"
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
_COLUMNS = "id, task, repetition, source, reward, failure, summary"
SCHEMA_VERSION = 2  # version 1, which was never released, had no table of commits


def check_index_file(path: Path) -> None:
    """Raise RunDamaged if the directory holds results, but its index is missing or empty."""
    file = path / DATABASE_NAME
    if not file.is_file():
        _raise_if_results(path, "is missing")
    elif not file.stat().st_size:
        _raise_if_results(path, "is empty")


def check_index_contents(path: Path, connection: sqlite3.Connection, required_fact: str | None) -> None:
    """Raise RunDamaged if the directory holds results, but its index has no tables or lacks the required fact."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone():
        _raise_if_results(path, "has no tables")
    elif required_fact and not connection.execute("SELECT 1 FROM facts WHERE key = ?", (required_fact,)).fetchone():
        _raise_if_results(path, "has lost its contents")


def check_index_pages(path: Path, connection: sqlite3.Connection) -> None:
    """Raise RunDamaged if SQLite finds a damaged page: with such an index, listed traces could be removed."""
    problems = [line for (line,) in connection.execute("PRAGMA quick_check(3)") if line != "ok"]
    if problems:
        raise make_damage_error(path, "; ".join(problems))


def merge_write_ahead_log(connection: sqlite3.Connection) -> bool:
    """Move the write-ahead log into the database; return False if a reader still uses the log."""
    connection.execute(f"PRAGMA busy_timeout = {MERGE_TIMEOUT * 1000:.0f}")
    is_busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not is_busy


def write_index_checksum(path: Path) -> None:
    """Store the checksum of a database that is closed and has no write-ahead log. A full disk leaves it without one."""
    with contextlib.suppress(OSError, RamifyError):
        content = f"{_hash_index(path)}  {DATABASE_NAME}\n".encode()
        with replace_file(path / CHECKSUM_NAME) as partial_path:
            write_and_fsync(partial_path, content)  # before the rename: a power failure must not leave an empty file
        fsync_path(path)


def remove_index_checksum(path: Path) -> None:
    """Remove the checksum, before anything in the database is changed."""
    with contextlib.suppress(FileNotFoundError):
        (path / CHECKSUM_NAME).unlink()
        fsync_path(path)


def has_index_checksum(path: Path) -> bool:
    """Return whether the database has a checksum: its last writer was not killed."""
    return (path / CHECKSUM_NAME).is_file()


def find_changed_index(path: Path) -> str | None:
    """Return the problem if the database does not match its checksum; None if it does, or if one of them is missing.

    Call it without open connections, or in a process that only reads: closing the file releases SQLite's locks on it.
    """
    if not has_index_checksum(path) or not (path / DATABASE_NAME).is_file():
        return None
    if (path / CHECKSUM_NAME).read_bytes()[:64] == _hash_index(path).encode():
        return None
    return f"it does not match {CHECKSUM_NAME}, which was written when the run was closed"


def check_index_checksum(path: Path) -> None:
    """Raise RunDamaged if the database has changed since the run was closed."""
    if problem := find_changed_index(path):
        raise make_damage_error(
            path, f"{problem}; if you changed or replaced it yourself, delete {path / CHECKSUM_NAME}"
        )


def _hash_index(path: Path) -> str:
    with (path / DATABASE_NAME).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_damage_error(path: Path, problem: str) -> RunDamaged:
    """Return the error for an index that SQLite cannot read."""
    return RunDamaged(f"{path / DATABASE_NAME} is damaged: {problem}; nothing was changed. {_recovery_hint(path)}")


def is_corruption_error(error: BaseException) -> bool:
    """Return whether SQLite reports that the file is damaged or not a database."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def describe_results(path: Path) -> str:
    """Return the results in a run directory as text, such as "2 checkpoints"; "" if there are none."""
    counts = {
        "trace segment": sum(file.stat().st_size > 0 for file in path.glob(f"{TRACES_DIR}/*.seg")),
        "checkpoint": sum(1 for _ in path.glob("checkpoints/step_*")),
        "weight version": len({file.parent for file in path.glob(WEIGHTS_GLOB)}),
    }
    return ", ".join(format_count(count, name) for name, count in counts.items() if count)


def _recovery_hint(path: Path) -> str:
    return RECOVERY_HINT + (USE_WEIGHTS_HINT if any(path.glob(WEIGHTS_GLOB)) else "")


def _raise_if_results(path: Path, problem: str) -> None:
    if results := describe_results(path):
        raise RunDamaged(
            f"{path / DATABASE_NAME} {problem}, but the directory holds {results}; nothing was "
            f"changed. {_recovery_hint(path)}"
        )


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


def check_version(path: Path, connection: sqlite3.Connection) -> None:
    """Raise RunDamaged if the file has tables of another version. A new file has neither tables nor version."""
    version = read_version(connection)
    is_new = version == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    if version != SCHEMA_VERSION and not is_new:
        raise RunDamaged(
            f"{path} has tables of version {version}; this version of ramify reads version {SCHEMA_VERSION}: "
            "use the version of ramify that wrote the run"
        )


def set_version(connection: sqlite3.Connection) -> None:
    """Store the version in a file, before its tables are created."""
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def read_version(connection: sqlite3.Connection) -> int:
    """Return the version of the tables; 0 for a new file."""
    return connection.execute("PRAGMA user_version").fetchone()[0]
