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
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from ramify.core.errors import DataCorrupt, RunDamaged, StorageFailed
from ramify.run.store.index import is_corruption_error
from ramify.run.store.run_store import make_readonly_uri
from ramify.run.store.run_writer import wrap_storage_errors
from ramify.trace import Timing, Trace
from ramify.view.rollout_filter import RolloutFilter, build_condition
from ramify.view.run_summary import open_last_commit

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

RowMarks = tuple[int, int, int]  # segment and end of the last indexed frame, number of the last row


class _Summary(msgspec.Struct):
    """The part of a rollout's summary that the index has as columns."""

    stop: str = ""
    calls: int = 0
    output: int = 0
    truncated: bool = False
    errors: dict[str, int] = {}
    timing: Timing = msgspec.field(default_factory=Timing)


_decode_summary = msgspec.msgpack.Decoder(_Summary).decode


class RolloutIndex:
    """The index of one run. Methods may be called from several threads; each call uses its own connection.

    A background thread adds what is missing. `refresh` starts it and waits for a moment, so a small run is complete
    when the first page is shown, and a large one is shown while it is being indexed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        is_writable = os.access(path, os.W_OK) and not (path / INDEX_FILE).is_symlink()  # it may lead anywhere
        self._folder = None if is_writable else tempfile.TemporaryDirectory(prefix="ramify-view-")
        self.file = (path if self._folder is None else Path(self._folder.name)) / INDEX_FILE
        self._lock = threading.Lock()
        self._facets: tuple[tuple[int, int], dict[str, dict[str, int]]] | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._wants_texts = False
        self._is_closed = threading.Event()

    def close(self) -> None:
        """Stop indexing. An index that could not be stored with the run is removed."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(BUSY_TIMEOUT)
        if self._folder is not None:
            self._folder.cleanup()

    # -- queries -------------------------------------------------------------------------------------------------

    def select(
        self, rollout_filter: RolloutFilter, *, sort: str, descending: bool, offset: int, limit: int
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return how many rollouts match, and a page of them, sorted; rollouts without a value come last.

        Those with equal values are in the order of `ramify show`.
        """
        condition, values = build_condition(rollout_filter)
        column, direction = SORT_COLUMNS[sort], "DESC" if descending else "ASC"
        order = f"number {direction}"
        if column != "number":
            order = f"{column} IS NULL, {column} {direction}, source, task, repetition, id"
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
            key = self.file.stat().st_ino, _get_mark(connection, "newest")  # another file: the run was started over
            facets = self._facets
            if facets is None or facets[0] != key:
                facets = self._facets = key, {facet: _count_values(connection, facet) for facet in FACETS}
            return facets[1]

    # -- updates -------------------------------------------------------------------------------------------------

    def refresh(self, *, texts: bool = False, wait: float = 0.0) -> float:
        """Add the rollouts that were committed since the last call; return the fraction of the run that is indexed.

        With `texts`, the messages are indexed too, and the fraction counts messages. `wait` is the most seconds
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
        except Exception as error:  # noqa: BLE001 - `refresh` raises it
            self._error = error

    def _add_rows(self, connection: sqlite3.Connection) -> None:
        """Add the rows behind the last indexed frame, in the order in which they were written."""
        while not self._is_closed.is_set() and not self._add_rows_alone(connection):
            pass

    def _add_rows_alone(self, connection: sqlite3.Connection) -> bool:
        """Add the rows, and return True; return False as soon as another viewer adds rows to the same index."""
        segment, stop, newest = marks = _get_row_marks(connection)
        last_frame = _get_last_frame(connection)
        has_ledger = connection.execute("SELECT 1 FROM run.sqlite_master WHERE name = 'attempts'").fetchone()
        group, join = "NULL, NULL", ""
        if has_ledger:
            group, join = "a.number, a.attempt", "LEFT JOIN run.attempts a ON a.rollout = r.id"
        cursor = connection.execute(
            f"SELECT r.segment, r.stop, r.id, r.source, r.task, r.repetition, r.reward, r.failure, r.summary, {group} "
            f"FROM run.rollouts r {join} WHERE r.segment > ? OR (r.segment = ? AND r.stop > ?) "
            "ORDER BY r.segment, r.stop",
            (segment, segment, stop),
        )
        rows = enumerate(cursor, start=newest + 1)
        columns, values = ", ".join(ROW_COLUMNS), ", ".join("?" * len(ROW_COLUMNS))
        while chunk := list(islice(rows, ROWS_PER_COMMIT)):
            if self._is_closed.is_set():
                return True
            with _transaction(connection):
                if _get_row_marks(connection) != marks:
                    return False
                query = f"INSERT OR REPLACE INTO rows ({columns}) VALUES ({values})"
                connection.executemany(query, (_to_row(number, row) for number, (_, _, *row) in chunk))
                number, (segment, stop, *_) = chunk[-1]
                marks = _set_row_marks(connection, segment, stop, number)
        with _transaction(connection):
            if _get_row_marks(connection) == marks:  # frames without a row were replaced
                _set_row_marks(connection, *max(last_frame, marks[:2]), marks[2])
        return True

    def _add_texts(self, connection: sqlite3.Connection) -> None:
        while not self._is_closed.is_set():
            query = "SELECT number, id FROM rows WHERE number > ? ORDER BY number LIMIT ?"
            first = _get_mark(connection, "texts")
            rows = connection.execute(query, (first, TEXTS_PER_COMMIT)).fetchall()
            if not rows:
                return
            texts = list(self._read_texts(rows))
            with _transaction(connection):
                if _get_mark(connection, "texts") != first:  # another viewer has added them
                    continue
                connection.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", texts)
                _set_marks(connection, texts=rows[-1][0])

    def _read_texts(self, rows: Sequence[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        with open_last_commit(self.path) as store:
            for number, id in rows:
                try:
                    traces = store.read_traces(id)
                except (KeyError, DataCorrupt):  # replaced meanwhile, or damaged: `ramify why --audit` reports it
                    continue
                yield number, "\n".join(_iter_texts(traces))[:MAX_TEXT_CHARS]

    @contextlib.contextmanager
    def _connect(self) -> Generator[sqlite3.Connection]:
        """Yield a connection to the index, with the run's database attached read-only as `run`.

        Raises StorageFailed for every error of the databases inside the block.
        """
        index_uri = f"file:{quote(os.fsencode(self.file.absolute()))}"
        with (
            wrap_storage_errors(self.path),
            self._explain_damage(),
            contextlib.closing(
                sqlite3.connect(index_uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT)
            ) as connection,
        ):
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")  # an index that is lost is built again
            connection.execute("ATTACH ? AS run", (make_readonly_uri(self.path),))
            _create_tables(connection)
            yield connection

    @contextlib.contextmanager
    def _explain_damage(self) -> Generator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if not is_corruption_error(error):
                raise
            hint = (
                f"delete {self.file} to build the index again, and check the run with 'ramify why {self.path} --audit'"
            )
            raise StorageFailed(f"{self.path} or the index of its rollouts is damaged: {error}; {hint}") from error


def _create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables if the file is new, or if another version of the index made the ones that are there."""
    if _get_version(connection) == INDEX_VERSION:
        return
    with _transaction(connection):
        if _get_version(connection) != INDEX_VERSION:  # no other viewer has created them
            for table in ("rows", "index_marks", "texts"):
                connection.execute(f"DROP TABLE IF EXISTS main.{table}")
            for statement in TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {INDEX_VERSION}")


def _get_version(connection: sqlite3.Connection) -> int:
    ((version,),) = connection.execute("PRAGMA user_version")
    return version


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


def _get_row_marks(connection: sqlite3.Connection) -> RowMarks:
    """Return the last indexed frame and the number of the last row."""
    segment, stop, newest = (_get_mark(connection, name) for name in ("segment", "stop", "newest"))
    return segment, stop, newest


def _set_row_marks(connection: sqlite3.Connection, segment: int, stop: int, newest: int) -> RowMarks:
    _set_marks(connection, segment=segment, stop=stop, newest=newest)
    return segment, stop, newest


def _get_last_frame(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the segment and the end of the last frame of the run."""
    rows = connection.execute("SELECT number, length FROM run.segments ORDER BY number DESC LIMIT 1").fetchall()
    return rows[0] if rows else (0, 0)


def _to_row(number: int, row: Sequence[Any]) -> tuple[Any, ...]:
    """Return a row of the index for a row of the run."""
    id, source, task, repetition, reward, failure, blob, group, attempt = row
    try:
        summary = _decode_summary(blob)
    except msgspec.DecodeError:  # `ramify why --audit` reports it
        summary = _Summary(errors={RunDamaged.__name__: 1})
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


def _iter_texts(traces: Sequence[Trace]) -> Iterator[str]:
    for trace in traces:
        for node in trace.nodes:
            message = node.message
            yield from filter(None, (message.reasoning, message.text))
            for call in message.tool_calls:
                yield f"{call.name} {call.arguments}"
