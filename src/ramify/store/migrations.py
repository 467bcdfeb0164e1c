"""The version of the tables in `run.sqlite`, and the migrations of older files.

The version is SQLite's `user_version` in the file's header. A file of version n is brought to the current
version by the migrations from n on, all in one transaction: either the file is current afterwards, or it is unchanged.
To change a table, append a function to `MIGRATIONS`; a migration that has been released is never changed.
"""

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from ramify.errors import SchemaUnsupported

Migration = Callable[[sqlite3.Connection], None]


def adopt_unversioned(_: sqlite3.Connection) -> None:
    """Accept a file without a version: its tables are those of version 1."""


def add_commits(connection: sqlite3.Connection) -> None:
    """Add the table of commits to a training run, with its last checkpoint, which had no incarnation in its name."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'marks'").fetchone():
        return
    connection.execute(
        "CREATE TABLE IF NOT EXISTS commits (version INTEGER PRIMARY KEY, incarnation INTEGER NOT NULL, "
        "directory TEXT NOT NULL, digest TEXT NOT NULL)"
    )
    marks: dict[str, int] = dict(connection.execute("SELECT name, value FROM marks"))
    if committed := marks.get("committed", 0):
        values = (committed, marks.get("incarnation", 0), f"step_{committed:06}", "")
        connection.execute("INSERT INTO commits VALUES (?, ?, ?, ?)", values)
    if connection.execute("SELECT 1 FROM served").fetchone():
        connection.execute("INSERT INTO marks VALUES ('registered', 1)")


MIGRATIONS: Sequence[Migration] = (adopt_unversioned, add_commits)


def check_version(path: Path, connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Raise SchemaUnsupported if the file was written by a later version of Ramify than this one."""
    version = read_version(connection)
    if version > len(migrations):
        raise SchemaUnsupported(
            f"{path} has tables of version {version}; this version of ramify reads up to {len(migrations)}: "
            "use the version of ramify that wrote the run, or a later one"
        )


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the tables to the current version; if a migration fails, the file keeps its tables and its version.

    A file without tables only gets the version: its tables are created as they are in the current version.
    """
    version = read_version(connection)
    if version >= len(migrations):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            for migration in migrations[version:]:
                migration(connection)
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def migrate_copy(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> sqlite3.Connection:
    """Return a connection with current tables for a reader, which must not change the file.

    If the file is older, the connection is closed, and the result is a migrated copy of the file in memory.
    """
    if all(migration is adopt_unversioned for migration in migrations[read_version(connection) :]):
        return connection  # the tables are current, also without a version
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        connection.backup(copy)
        migrate(copy, migrations)
    except BaseException:
        copy.close()
        raise
    connection.close()
    return copy


def read_version(connection: sqlite3.Connection) -> int:
    """Return the version of the tables; 0 for a new file, and for a file from before versions were stored."""
    return connection.execute("PRAGMA user_version").fetchone()[0]
