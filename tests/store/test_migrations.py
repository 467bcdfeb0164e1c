"""Older tables are migrated once, newer ones are refused."""

import sqlite3

import pytest

from ramify.errors import SchemaUnsupported
from ramify.store.migrations import MIGRATIONS, check_version, migrate, migrate_copy, read_version
from ramify.store.run_store import RunStore


def connect(path):
    return sqlite3.connect(path, isolation_level=None)


def add_color(connection):
    connection.execute("ALTER TABLE runs ADD COLUMN color TEXT DEFAULT 'grey'")


def fill_color(connection):
    connection.execute("UPDATE runs SET color = 'green' WHERE name = 'a'")


@pytest.fixture
def older(tmp_path):
    """A file of version 1 with one row."""
    connection = connect(tmp_path / "older.sqlite")
    connection.execute("CREATE TABLE runs (name TEXT)")
    connection.execute("INSERT INTO runs VALUES ('a')")
    connection.execute("PRAGMA user_version = 1")
    return connection


STEPS = (*MIGRATIONS, add_color, fill_color)


def test_pending_migrations_run_once_and_in_order(older):
    migrate(older, STEPS)
    assert read_version(older) == len(STEPS)
    assert older.execute("SELECT name, color FROM runs").fetchall() == [("a", "green")]
    migrate(older, STEPS)  # a second ALTER TABLE would raise
    assert read_version(older) == len(STEPS)


def test_a_file_without_tables_gets_the_current_version_and_no_migration(tmp_path):
    for version in (0, 1):
        connection = connect(tmp_path / f"{version}.sqlite")
        connection.execute(f"PRAGMA user_version = {version}")
        migrate(connection, STEPS)  # an ALTER TABLE would raise
        assert read_version(connection) == len(STEPS)


def test_a_migration_that_fails_changes_nothing(older):
    def fail(_):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        migrate(older, (*MIGRATIONS, add_color, fail))
    assert read_version(older) == 1
    assert [column[1] for column in older.execute("PRAGMA table_info(runs)")] == ["name"]


def test_a_reader_sees_current_tables_and_leaves_the_file_unchanged(older, tmp_path):
    migrated = migrate_copy(older, STEPS)
    assert migrated.execute("SELECT color FROM runs").fetchall() == [("green",)]
    file = connect(tmp_path / "older.sqlite")
    assert read_version(file) == 1
    assert [column[1] for column in file.execute("PRAGMA table_info(runs)")] == ["name"]


def test_a_reader_of_a_current_file_keeps_its_connection(older):
    migrate(older, STEPS)
    assert migrate_copy(older, STEPS) is older


@pytest.mark.parametrize("write", [True, False])
def test_a_run_of_a_later_version_is_refused_and_unchanged(tmp_path, write):
    RunStore.open(tmp_path / "run").close()
    file = tmp_path / "run" / "run.sqlite"
    connection = connect(file)
    assert read_version(connection) == len(MIGRATIONS)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    (tmp_path / "run" / "run.sqlite.sha256").unlink()
    with pytest.raises(SchemaUnsupported, match=r"version \d+.*reads up to \d+.*later one"):
        RunStore.open(tmp_path / "run", write=write)
    assert read_version(connect(file)) == len(MIGRATIONS) + 1


@pytest.mark.parametrize("write", [True, False])
def test_a_run_of_a_later_version_with_other_tables_is_not_called_damaged(tmp_path, write):
    RunStore.open(tmp_path / "run").close()
    (tmp_path / "run" / "traces" / "000000.seg").write_bytes(b"a frame")
    connection = connect(tmp_path / "run" / "run.sqlite")
    connection.execute("ALTER TABLE facts RENAME TO settings")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    (tmp_path / "run" / "run.sqlite.sha256").unlink()
    with pytest.raises(SchemaUnsupported, match="later one"):
        RunStore.open(tmp_path / "run", write=write)


def test_a_run_without_a_version_gets_one_when_it_is_opened_for_writing(tmp_path):
    RunStore.open(tmp_path / "run").close()
    file = tmp_path / "run" / "run.sqlite"
    connection = connect(file)
    connection.execute("PRAGMA user_version = 0")
    connection.close()
    (tmp_path / "run" / "run.sqlite.sha256").unlink()
    RunStore.open(tmp_path / "run", write=False).close()
    assert read_version(connect(file)) == 0
    RunStore.open(tmp_path / "run").close()
    assert read_version(connect(file)) == len(MIGRATIONS)
    check_version(file, connect(file))


def test_training_run_from_before_commits_gets_the_commit_of_its_checkpoint(tmp_path):
    connection = connect(tmp_path / "older.sqlite")
    connection.execute("CREATE TABLE marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL)")
    connection.execute("INSERT INTO marks VALUES ('committed', 8), ('incarnation', 3)")
    connection.execute("CREATE TABLE served (incarnation INTEGER, step INTEGER, members BLOB)")
    connection.execute("INSERT INTO served VALUES (3, 7, x'')")
    connection.execute("PRAGMA user_version = 1")
    migrate(connection)
    assert connection.execute("SELECT * FROM commits").fetchall() == [(8, 3, "step_000008", "")]
    assert connection.execute("SELECT value FROM marks WHERE name = 'registered'").fetchall() == [(1,)]
