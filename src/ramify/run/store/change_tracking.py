"""Which rows of a run's tables have changed since the last entry of the head log.

Triggers record the key of every row that is inserted, updated or deleted, in the transaction of the change. So nothing
is missed, whichever process changes the tables and however it ends. Only keys are recorded: an entry has the rows as
they are when it is made, so applying an entry twice is the same as applying it once.

    a row changes  -> changed_rows (generation g, table, key)
    collect        -> read all recorded rows; later changes are recorded under generation g + 1
    confirm        -> the entry exists: forget generations up to g
"""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from ramify.run.store.index import read_version

TRACKING_TABLES = ("head_log", "changed_rows")
KEYS_PER_QUERY = 500
_CREATE_TRACKING = """
CREATE TABLE IF NOT EXISTS head_log (
    term INTEGER NOT NULL, next_entry INTEGER NOT NULL, pending_digest TEXT NOT NULL, generation INTEGER NOT NULL,
    segment INTEGER NOT NULL, segment_length INTEGER NOT NULL, tables_version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS changed_rows (
    generation INTEGER NOT NULL, table_name TEXT NOT NULL, key TEXT NOT NULL,
    PRIMARY KEY (generation, table_name, key)) WITHOUT ROWID;
"""


class HeadState(NamedTuple):
    """What a head knows of its own entries, stored in its run directory.

    `next_entry` is the number of the next entry of `term`. `pending_digest` identifies an entry that may have been
    created already; "" if there is none. Trace segments are in the log up to byte `segment_length` of `segment`.
    `tables_version` is the version of the tables in the last entry; -1 before the first one.
    """

    term: int
    next_entry: int = 0
    pending_digest: str = ""
    generation: int = 0
    segment: int = 0
    segment_length: int = 0
    tables_version: int = -1


class ChangedRows(msgspec.Struct, frozen=True):
    """The changed rows of one table, with their current values, and the keys of those that were deleted."""

    columns: tuple[str, ...]
    key: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    deleted: list[tuple[Any, ...]]


class TableChanges(msgspec.Struct, frozen=True):
    """The changes of all tables. If they are complete, they hold all rows of the run, and those before do not count."""

    version: int
    is_complete: bool
    schema: dict[str, str]  # the statements that create the tables and indexes, by name
    tables: dict[str, ChangedRows]


class _Table(NamedTuple):
    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]


def read_head_state(connection: sqlite3.Connection) -> HeadState | None:
    """Return the state of the head; None if the changes of this run are not tracked."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'head_log'").fetchone():
        return None
    row = connection.execute("SELECT * FROM head_log").fetchone()
    return HeadState(*row) if row else None


def write_head_state(connection: sqlite3.Connection, state: HeadState) -> None:
    """Replace the state of the head."""
    connection.execute("DELETE FROM head_log")
    connection.execute(f"INSERT INTO head_log VALUES ({', '.join('?' * len(state))})", state)


def set_pending_digest(connection: sqlite3.Connection, digest: str) -> None:
    """Record that an entry with this digest may be created from now on."""
    connection.execute("UPDATE head_log SET pending_digest = ?", (digest,))


def skip_entry(connection: sqlite3.Connection) -> None:
    """Record that the pending entry exists, but not which changes are in it."""
    connection.execute("UPDATE head_log SET next_entry = next_entry + 1, pending_digest = ''")


def start_tracking(connection: sqlite3.Connection, state: HeadState) -> None:
    """Track the changes of all tables from now on. Rows that exist now count as unchanged."""
    for statement in _CREATE_TRACKING.split(";"):
        connection.execute(statement)
    write_head_state(connection, state)
    for table in _list_tables(connection):
        _create_triggers(connection, table)


def collect_changes(connection: sqlite3.Connection) -> TableChanges | None:
    """Return what has changed since the last confirmed entry, and begin a new generation; None without a change.

    If the version of the tables has changed since then, or there is no entry yet, all rows count as changed.
    """
    state, version = read_head_state(connection), read_version(connection)
    assert state is not None, "start_tracking first"
    is_complete = version != state.tables_version
    tables = list(_list_tables(connection))
    for table in tables:
        if _create_triggers(connection, table) or is_complete:
            _mark_all_rows(connection, table)
    changes = {table.name: rows for table in tables if (rows := _read_changed_rows(connection, table)) is not None}
    if not changes and not is_complete:
        return None
    connection.execute("UPDATE head_log SET generation = generation + 1")
    return TableChanges(version, is_complete, _read_schema(connection), changes)


def confirm_entry(connection: sqlite3.Connection, state: HeadState) -> None:
    """Record that the next entry exists, with the changes up to `state.generation`; `state` is what the log has now."""
    connection.execute(
        "UPDATE head_log SET next_entry = ?, pending_digest = '', segment = ?, segment_length = ?, tables_version = ?",
        (state.next_entry, state.segment, state.segment_length, state.tables_version),
    )
    connection.execute("DELETE FROM changed_rows WHERE generation <= ?", (state.generation,))


def apply_changes(connection: sqlite3.Connection, changes: TableChanges) -> None:
    """Bring tables to the state that the changes were collected from; call it for one entry after another."""
    if changes.is_complete:
        for table in list(_list_tables(connection)):
            connection.execute(f"DROP TABLE {_quote_name(table.name)}")
    existing = _read_schema(connection).keys()
    for name, statement in changes.schema.items():
        if name not in existing:
            connection.execute(statement)
    for name, changed in changes.tables.items():
        condition = " AND ".join(f"{_quote_name(column)} = ?" for column in changed.key)
        connection.executemany(f"DELETE FROM {_quote_name(name)} WHERE {condition}", changed.deleted)
        columns = ", ".join(map(_quote_name, changed.columns))
        values = ", ".join("?" * len(changed.columns))
        connection.executemany(
            f"INSERT OR REPLACE INTO {_quote_name(name)} ({columns}) VALUES ({values})", changed.rows
        )
    connection.execute(f"PRAGMA user_version = {changes.version}")


def _list_tables(connection: sqlite3.Connection) -> Iterator[_Table]:
    """Yield the tables of the run. The key of a table without a primary key is its rowid, which is a column then."""
    names = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name"
    )
    for (name,) in names.fetchall():
        if name in TRACKING_TABLES:
            continue
        info = connection.execute(f"PRAGMA table_info({_quote_name(name)})").fetchall()
        columns = tuple(column for _, column, *_ in info)
        key = tuple(column for _, column, *_ in sorted((row for row in info if row[5]), key=lambda row: row[5]))
        yield _Table(name, columns, key) if key else _Table(name, ("rowid", *columns), ("rowid",))


def _create_triggers(connection: sqlite3.Connection, table: _Table) -> bool:
    """Create the triggers of a table; return False if it has them."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (f"track_insert_{table.name}",)).fetchone():
        return False
    for event, rows in {"insert": ("NEW",), "update": ("OLD", "NEW"), "delete": ("OLD",)}.items():
        statements = "".join(
            f"INSERT OR IGNORE INTO changed_rows SELECT generation, '{table.name}', {_format_key(table, row)} "
            "FROM head_log; "
            for row in rows
        )
        trigger, name = _quote_name(f"track_{event}_{table.name}"), _quote_name(table.name)
        connection.execute(f"CREATE TRIGGER {trigger} AFTER {event} ON {name} BEGIN {statements}END")
    return True


def _mark_all_rows(connection: sqlite3.Connection, table: _Table) -> None:
    name, key = _quote_name(table.name), _format_key(table, "t")
    connection.execute(
        f"INSERT OR IGNORE INTO changed_rows SELECT generation, '{table.name}', {key} FROM head_log, {name} AS t"
    )


def _read_changed_rows(connection: sqlite3.Connection, table: _Table) -> ChangedRows | None:
    query = "SELECT DISTINCT key FROM changed_rows WHERE table_name = ?"
    keys = [key for (key,) in connection.execute(query, (table.name,))]
    if not keys:
        return None
    changed = ChangedRows(table.columns, table.key, [], [])
    width = len(table.key)
    columns = ", ".join([f"k.column{i + 1}" for i in range(width)] + [f"t.{_quote_name(c)}" for c in table.columns])
    join = " AND ".join(f"t.{_quote_name(column)} = k.column{i + 1}" for i, column in enumerate(table.key))
    first_key = table.columns.index(table.key[0])
    for start in range(0, len(keys), KEYS_PER_QUERY):
        values = ", ".join(f"({key})" for key in keys[start : start + KEYS_PER_QUERY])
        query = f"SELECT {columns} FROM (VALUES {values}) AS k LEFT JOIN {_quote_name(table.name)} AS t ON {join}"
        for row in connection.execute(query):
            key, current = row[:width], row[width:]
            if current[first_key] is None:
                changed.deleted.append(key)
            else:
                changed.rows.append(current)
    return changed


def _read_schema(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the statements that create the run's tables and indexes, by name, in the order of their creation."""
    query = "SELECT name, tbl_name, sql FROM sqlite_master WHERE type IN ('table', 'index') AND sql NOT NULL"
    rows: Sequence[tuple[str, str, str]] = connection.execute(f"{query} ORDER BY rowid").fetchall()
    return {name: sql for name, table, sql in rows if table not in TRACKING_TABLES and not name.startswith("sqlite")}


def _format_key(table: _Table, row: str) -> str:
    """Return the SQL expression of a row's key as literals, such as `12, 'text'`."""
    return " || ', ' || ".join(f"quote({row}.{_quote_name(column)})" for column in table.key)


def _quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
