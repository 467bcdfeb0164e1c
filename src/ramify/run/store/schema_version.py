"""The version of the tables in `run.sqlite`: SQLite's `user_version` in the file's header."""

import sqlite3
from pathlib import Path

from ramify.core.errors import RunDamaged

SCHEMA_VERSION = 2  # version 1, which was never released, had no table of commits


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
