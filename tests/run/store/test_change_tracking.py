"""Every changed row is recorded, whatever changes it, and applying the records gives equal tables."""

import sqlite3

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.run.store.change_tracking import (
    HeadState,
    TableChanges,
    apply_changes,
    collect_changes,
    confirm_entry,
    read_head_state,
    start_tracking,
)

TABLES = """
CREATE TABLE numbered (number INTEGER PRIMARY KEY, text TEXT, data BLOB);
CREATE TABLE pairs (a INTEGER NOT NULL, b TEXT NOT NULL, value REAL, PRIMARY KEY (a, b)) WITHOUT ROWID;
CREATE INDEX pairs_by_value ON pairs (value);
CREATE TABLE log (time REAL NOT NULL, kind TEXT NOT NULL);
"""


@pytest.fixture
def connection():
    connection = make_database()
    start_tracking(connection, HeadState(0))
    return connection


def make_database():
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(TABLES)
    connection.execute("PRAGMA user_version = 3")
    return connection


def collect(connection):
    """Return the changes as they are read from storage, and confirm them."""
    state = read_head_state(connection)
    changes = collect_changes(connection)
    if changes is not None:
        confirm_entry(connection, state._replace(next_entry=state.next_entry + 1, tables_version=changes.version))
        changes = msgspec.msgpack.decode(msgspec.msgpack.encode(changes), type=TableChanges)
    return changes


def dump(connection):
    return {
        name: sorted(connection.execute(f"SELECT {'rowid, ' * (name == 'log')}* FROM {name}").fetchall())
        for name in ("numbered", "pairs", "log")
    }


def restore(entries):
    copy = sqlite3.connect(":memory:", isolation_level=None)
    for entry in entries:
        apply_changes(copy, entry)
    return copy


def test_first_entry_has_all_rows_and_later_ones_only_what_changed(connection):
    connection.execute("INSERT INTO numbered VALUES (1, 'one', x'00ff'), (2, 'it''s', NULL)")
    connection.execute("INSERT INTO log VALUES (0.5, 'started')")
    entries = [collect(connection)]
    assert entries[0].is_complete
    assert collect(connection) is None
    connection.execute("UPDATE numbered SET text = 'two' WHERE number = 2")
    connection.execute("DELETE FROM numbered WHERE number = 1")
    connection.execute("INSERT OR REPLACE INTO pairs VALUES (1, 'x', 0.5)")
    entries.append(collect(connection))
    changed = entries[1].tables["numbered"]
    assert (entries[1].is_complete, changed.rows, changed.deleted) == (False, [(2, "two", None)], [(1,)])
    assert "log" not in entries[1].tables
    copy = restore(entries)
    assert dump(copy) == dump(connection)
    assert dump(restore([*entries, entries[1]])) == dump(connection)  # an entry may be there twice
    assert copy.execute("PRAGMA user_version").fetchone() == (3,)
    assert copy.execute("SELECT 1 FROM sqlite_master WHERE name = 'pairs_by_value'").fetchone()


def test_rolled_back_change_is_not_recorded(connection):
    collect(connection)
    connection.execute("BEGIN")
    connection.execute("SAVEPOINT change")
    connection.execute("INSERT INTO log VALUES (1.0, 'x')")
    connection.execute("ROLLBACK TO change")
    connection.execute("COMMIT")
    assert collect(connection) is None


def test_change_while_an_entry_is_being_created_is_in_the_next_one(connection):
    collect(connection)
    connection.execute("INSERT INTO numbered VALUES (1, 'old', NULL)")
    state = read_head_state(connection)
    collect_changes(connection)
    connection.execute("INSERT OR REPLACE INTO numbered VALUES (1, 'new', NULL)")
    confirm_entry(connection, state._replace(next_entry=2))
    assert collect(connection).tables["numbered"].rows == [(1, "new", None)]


def test_changes_of_an_entry_whose_creation_failed_are_collected_again(connection):
    collect(connection)
    connection.execute("INSERT INTO numbered VALUES (1, 'a', NULL)")
    collect_changes(connection)  # and the process dies
    connection.execute("INSERT INTO numbered VALUES (2, 'b', NULL)")
    assert collect(connection).tables["numbered"].rows == [(1, "a", None), (2, "b", None)]


def test_new_table_and_tables_of_another_version(connection):
    entries = [collect(connection)]
    connection.execute("CREATE TABLE added (name TEXT PRIMARY KEY) WITHOUT ROWID")
    connection.execute("INSERT INTO added VALUES ('before it was tracked')")
    entries.append(collect(connection))
    connection.execute("INSERT INTO added VALUES ('after')")
    entries.append(collect(connection))
    assert restore(entries).execute("SELECT count(*) FROM added").fetchone() == (2,)
    connection.execute("ALTER TABLE pairs ADD COLUMN extra TEXT NOT NULL DEFAULT ''")
    connection.execute("PRAGMA user_version = 4")
    entries.append(collect(connection))
    assert entries[-1].is_complete
    assert dump(restore(entries)) == dump(connection)


ROWS = {
    "numbered": st.tuples(st.integers(0, 5), st.text(max_size=3), st.binary(max_size=3)),
    "pairs": st.tuples(st.integers(-2, 2), st.sampled_from(["", "'", "a, b", "ü"]), st.floats(0, 1)),
    "log": st.tuples(st.floats(0, 1), st.text(max_size=2)),
}
CHANGES = st.one_of(
    st.just(("collect",)),
    *(
        st.tuples(st.sampled_from(["INSERT OR REPLACE", "INSERT OR IGNORE"]), st.just(name), rows)
        for name, rows in ROWS.items()
    ),
    st.tuples(st.just("DELETE"), st.sampled_from(sorted(ROWS)), st.integers(-2, 5)),
    st.tuples(st.just("UPDATE"), st.integers(0, 5), st.integers(0, 5)),
)


@given(st.lists(CHANGES, max_size=20))
def test_restored_tables_are_equal(changes):
    connection, entries = make_database(), []
    start_tracking(connection, HeadState(0))
    for kind, *arguments in [*changes, ("collect",)]:
        if kind == "collect":
            entries.append(collect(connection))
        elif kind == "DELETE":
            column = {"numbered": "number", "pairs": "a", "log": "rowid"}[arguments[0]]
            connection.execute(f"DELETE FROM {arguments[0]} WHERE {column} = ?", (arguments[1],))
        elif kind == "UPDATE":  # also changes the key
            connection.execute("UPDATE OR REPLACE numbered SET number = ? WHERE number = ?", arguments)
        else:
            values = ", ".join("?" * len(arguments[1]))
            connection.execute(f"{kind} INTO {arguments[0]} VALUES ({values})", arguments[1])
    restored = restore([entry for entry in entries if entry is not None])
    assert dump(restored) == dump(connection)
