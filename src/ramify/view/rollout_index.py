"""An index of the rollouts of a run, for the table of the page: filter, sort, page and search 100,000 rows.

The rows of `run.sqlite` hold stop reason, errors and counts inside a blob, and no text of messages. The index has them
as columns, and a full-text index of the messages, in `view.sqlite` beside it. It is built when it is first needed, by
the viewer, from committed rows; the run never reads it, and deleting it loses nothing. Traces are appended in order, so
an update reads only what lies behind the last indexed trace. A replaced rollout gets a new row number, which hides the
old text.
"""

import contextlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from ramify.errors import RamifyError, TraceCorrupt
from ramify.store.run_store import make_readonly_uri
from ramify.store.run_writer import to_storage_error
from ramify.trace import Timing, Trace
from ramify.view.run_state import open_last_commit

INDEX_FILE = "view.sqlite"
INDEX_VERSION = 1
MAX_TEXT_CHARS = 200_000  # of one rollout that can be searched
TEXTS_PER_COMMIT = 200
ROWS_PER_COMMIT = 5000
ALMOST_ALL = 0.99  # the fraction of a run whose last rollouts are not indexed yet
BUSY_TIMEOUT = 10.0  # seconds to wait for another viewer that updates the same index

TABLES = (
    """CREATE TABLE rows (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, source TEXT NOT NULL, task TEXT NOT NULL,
    repetition INTEGER NOT NULL, reward REAL, failure TEXT, stop TEXT NOT NULL, errors TEXT NOT NULL,
    calls INTEGER NOT NULL, tokens INTEGER NOT NULL, seconds REAL NOT NULL, truncated INTEGER NOT NULL,
    group_number INTEGER, attempt INTEGER)""",
    "CREATE INDEX rows_by_group ON rows (group_number)",
    # segment, stop: the last indexed frame; newest: the last row; texts: the last row whose messages are indexed
    "CREATE TABLE index_marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE VIRTUAL TABLE texts USING fts5 (text, content = '')",
)
ROW_COLUMNS = (
    *("number", "id", "source", "task", "repetition", "reward", "failure", "stop", "errors", "calls", "tokens"),
    *("seconds", "truncated", "group_number", "attempt"),
)
SORT_COLUMNS = {"reward": "reward", "tokens": "tokens", "seconds": "seconds", "calls": "calls", "newest": "number"}
FACETS = ("source", "stop", "errors")


class _Summary(msgspec.Struct):
    """The part of a rollout's summary that the index has as columns."""

    stop: str = ""
    calls: int = 0
    output: int = 0
    truncated: bool = False
    errors: dict[str, int] = {}
    timing: Timing = msgspec.field(default_factory=Timing)


_decode_summary = msgspec.msgpack.Decoder(_Summary).decode


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Which rollouts to list. `error` is the name of a failure or an error; "any" is every rollout with one.

    `state` is a state of the ledger, such as `dropped`; `text` are words that all occur in the messages.
    """

    source: str | None = None
    step: int | None = None
    group: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    stop: str | None = None
    error: str | None = None
    state: str | None = None
    text: str | None = None


class RolloutIndex:
    """The index of one run. Methods may be called from several threads; each call uses its own connection.

    A background thread adds what is missing. `refresh` starts it and waits for a moment, so a small run is complete
    when the first page is shown, and a large one is shown while it is being indexed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        is_writable = os.access(path, os.W_OK)
        self._folder = None if is_writable else tempfile.TemporaryDirectory(prefix="ramify-view-")
        self.file = (path if self._folder is None else Path(self._folder.name)) / INDEX_FILE
        self._lock = threading.Lock()
        self._facets: tuple[int, dict[str, dict[str, int]]] | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._wants_texts = False
        self._is_closed = threading.Event()
        with self._connect() as connection:
            _create_tables(connection)

    def close(self) -> None:
        """Stop indexing. An index that could not be stored with the run is removed."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(BUSY_TIMEOUT)
        if self._folder is not None:
            self._folder.cleanup()

    # -- queries -------------------------------------------------------------------------------------------------

    def select(
        self, rows: RolloutFilter, *, sort: str, descending: bool, offset: int, limit: int
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return how many rollouts match, and a page of them, sorted; rollouts without a value come last."""
        condition, values = _build_condition(rows)
        column, direction = SORT_COLUMNS[sort], "DESC" if descending else "ASC"
        order = f"number {direction}" if column == "number" else f"{column} IS NULL, {column} {direction}, number"
        columns = ", ".join(ROW_COLUMNS)
        with self._connect() as connection:
            ((total,),) = connection.execute(f"SELECT count(*) FROM rows WHERE {condition}", values)
            query = f"SELECT {columns} FROM rows WHERE {condition} ORDER BY {order} LIMIT ? OFFSET ?"
            page = connection.execute(query, (*values, limit, offset)).fetchall()
        return total, [dict(zip(ROW_COLUMNS, row)) for row in page]

    def select_ids(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows of these rollouts."""
        columns, marks = ", ".join(ROW_COLUMNS), ", ".join("?" * len(ids))
        with self._connect() as connection:
            rows = connection.execute(f"SELECT {columns} FROM rows WHERE id IN ({marks})", ids).fetchall()
        return [dict(zip(ROW_COLUMNS, row)) for row in rows]

    def get_facets(self) -> Mapping[str, Mapping[str, int]]:
        """Return the number of rollouts of each source, stop reason and error."""
        with self._connect() as connection:
            newest = _get_mark(connection, "newest")
            if self._facets is None or self._facets[0] != newest:
                self._facets = newest, {facet: _count_values(connection, facet) for facet in FACETS}
            return self._facets[1]

    # -- updates -------------------------------------------------------------------------------------------------

    def refresh(self, *, texts: bool = False, wait: float = 0.0) -> float:
        """Add the rollouts that were committed since the last call; return the fraction of the run that is indexed.

        With `texts`, the messages are indexed too, and the fraction is that of the messages. `wait` is the most seconds
        to wait for the rest. Raises StorageFailed or RunDamaged if the run cannot be read.
        """
        with self._lock:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._wants_texts |= texts
            if self._thread is None or not self._thread.is_alive():
                if (fraction := self._get_fraction(texts)) >= 1.0:
                    return fraction
                self._thread = threading.Thread(target=self._run, name="rollout index", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(wait)
        return self._get_fraction(texts)

    def _get_fraction(self, texts: bool) -> float:
        with self._connect() as connection:
            newest, searchable = _get_mark(connection, "newest"), _get_mark(connection, "texts")
            if _get_last_frame(connection) == (_get_mark(connection, "segment"), _get_mark(connection, "stop")):
                return searchable / newest if texts and newest else 1.0
            ((total,),) = connection.execute("SELECT count(*) FROM run.rollouts")
            ((indexed,),) = connection.execute("SELECT count(*) FROM rows")
        fraction = min(indexed / total if total else 1.0, ALMOST_ALL)
        return min(fraction, searchable / newest) if texts and newest else fraction

    def _run(self) -> None:
        try:
            with self._connect() as connection:
                self._add_rows(connection)
                if self._wants_texts:
                    self._add_texts(connection)
        except (RamifyError, sqlite3.Error, OSError) as error:
            self._error = to_storage_error(error, self.path)

    def _add_rows(self, connection: sqlite3.Connection) -> None:
        """Add the rows behind the last indexed frame, in the order in which they were written."""
        segment, stop, last = (_get_mark(connection, name) for name in ("segment", "stop", "newest"))
        newest = _get_last_frame(connection)
        has_ledger = connection.execute("SELECT 1 FROM run.sqlite_master WHERE name = 'attempts'").fetchone()
        group, join = "NULL, NULL", ""
        if has_ledger:
            group, join = "a.number, a.attempt", "LEFT JOIN run.attempts a ON a.rollout = r.id"
        cursor = connection.execute(
            f"SELECT r.id, r.source, r.task, r.repetition, r.reward, r.failure, r.summary, {group} "
            f"FROM run.rollouts r {join} WHERE r.segment > ? OR (r.segment = ? AND r.stop > ?) "
            "ORDER BY r.segment, r.stop",
            (segment, segment, stop),
        )
        rows = enumerate(cursor, start=last + 1)
        columns, marks = ", ".join(ROW_COLUMNS), ", ".join("?" * len(ROW_COLUMNS))
        while chunk := list(islice(rows, ROWS_PER_COMMIT)):
            if self._is_closed.is_set():
                return
            with _transaction(connection):
                query = f"INSERT OR REPLACE INTO rows ({columns}) VALUES ({marks})"
                connection.executemany(query, (_to_row(number, row) for number, row in chunk))
        with _transaction(connection):
            ((number,),) = connection.execute("SELECT coalesce(max(number), 0) FROM rows")
            _set_marks(connection, segment=newest[0], stop=newest[1], newest=number)

    def _add_texts(self, connection: sqlite3.Connection) -> None:
        while not self._is_closed.is_set():
            query = "SELECT number, id FROM rows WHERE number > ? ORDER BY number LIMIT ?"
            rows = connection.execute(query, (_get_mark(connection, "texts"), TEXTS_PER_COMMIT)).fetchall()
            if not rows:
                return
            texts = list(self._read_texts(rows))
            with _transaction(connection):
                connection.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", texts)
                _set_marks(connection, texts=rows[-1][0])

    def _read_texts(self, rows: Sequence[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        with open_last_commit(self.path) as store:
            for number, id in rows:
                try:
                    traces = store.read_traces(id)
                except (KeyError, TraceCorrupt):  # replaced meanwhile, or damaged: `ramify why --audit` reports it
                    continue
                yield number, "\n".join(_iter_texts(traces))[:MAX_TEXT_CHARS]

    @contextlib.contextmanager
    def _connect(self) -> Generator[sqlite3.Connection]:
        """Yield a connection to the index, with the run's database attached read-only as `run`."""
        index_uri = f"file:{quote(str(self.file.absolute()))}"
        connection = sqlite3.connect(index_uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")  # an index that is lost is built again
            connection.execute("ATTACH ? AS run", (make_readonly_uri(self.path),))
            yield connection
        finally:
            connection.close()


def _create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables, also if another version of the index made the ones that are there."""
    with _transaction(connection):
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != INDEX_VERSION:
            for table in ("rows", "index_marks", "texts"):
                connection.execute(f"DROP TABLE IF EXISTS main.{table}")
            for statement in TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {INDEX_VERSION}")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _get_mark(connection: sqlite3.Connection, name: str) -> int:
    row = connection.execute("SELECT value FROM index_marks WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else row[0]


def _set_marks(connection: sqlite3.Connection, **marks: int) -> None:
    connection.executemany("INSERT OR REPLACE INTO index_marks VALUES (?, ?)", marks.items())


def _get_last_frame(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the segment and the end of the last frame of the run."""
    rows = connection.execute("SELECT number, length FROM run.segments ORDER BY number DESC LIMIT 1").fetchall()
    return rows[0] if rows else (0, 0)


def _to_row(number: int, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row of the index for a row of the run."""
    id, source, task, repetition, reward, failure, blob, group, attempt = row
    summary = _decode_summary(blob)
    timing = summary.timing
    errors = " ".join(dict.fromkeys([failure, *summary.errors] if failure else summary.errors))
    # `harness` includes `model` and `stalled`.
    seconds = timing.boot + timing.setup + timing.harness + timing.finalize + timing.scoring
    counts = (summary.calls, summary.output, seconds, summary.truncated)
    return number, id, source, task, repetition, reward, failure, summary.stop, errors, *counts, group, attempt


def _count_values(connection: sqlite3.Connection, facet: str) -> dict[str, int]:
    rows = connection.execute(f"SELECT {facet}, count(*) FROM rows GROUP BY 1 ORDER BY 2 DESC").fetchall()
    counts: dict[str, int] = {}
    for value, count in rows:
        for name in value.split() if facet == "errors" else [value]:
            counts[name] = counts.get(name, 0) + count
    return counts


def _build_condition(rows: RolloutFilter) -> tuple[str, list[Any]]:
    """Return the SQL condition of a filter, and its values."""
    conditions: list[tuple[str, Any]] = [
        ("source = ?", rows.source),
        ("group_number IN (SELECT number FROM run.groups WHERE step = ?)", rows.step),
        ("group_number = ?", rows.group),
        ("reward >= ?", rows.min_reward),
        ("reward <= ?", rows.max_reward),
        ("stop = ?", rows.stop),
        ("group_number IN (SELECT number FROM run.groups WHERE state = ?)", rows.state),
        ("number IN (SELECT rowid FROM texts WHERE texts MATCH ?)", _build_match(rows.text)),
    ]
    conditions = [(sql, value) for sql, value in conditions if value is not None]
    if rows.error == "any":
        conditions.append(("errors != ?", ""))
    elif rows.error:
        conditions.append(("' ' || errors || ' ' LIKE ?", f"% {rows.error} %"))
    return " AND ".join(sql for sql, _ in conditions) or "1", [value for _, value in conditions]


def _build_match(text: str | None) -> str | None:
    """Return a full-text query for all words of a text; the last one may be the beginning of a word."""
    words = [word.replace('"', '""') for word in (text or "").split()]
    return " ".join(f'"{word}"' for word in words) + "*" if words else None


def _iter_texts(traces: Sequence[Trace]) -> Iterator[str]:
    for trace in traces:
        for node in trace.nodes:
            message = node.message
            yield from filter(None, (message.reasoning, message.text))
            for call in message.tool_calls:
                yield f"{call.name} {call.arguments}"
