"""The version of the tables in `run.sqlite`: SQLite's `user_version` in the file's header."""

import sqlite3
from pathlib import Path

from ramify.errors import SchemaUnsupported

SCHEMA_VERSION = 1


def check_version(path: Path, connection: sqlite3.Connection) -> None:
    """Raise SchemaUnsupported if the file has a version, but another one than this version of Ramify writes."""
    version = read_version(connection)
    if version not in (0, SCHEMA_VERSION):
        raise SchemaUnsupported(
            f"{path} has tables of version {version}; this version of ramify reads version {SCHEMA_VERSION}: "
            "use the version of ramify that wrote the run"
        )


def set_version(connection: sqlite3.Connection) -> None:
    """Store the version in a file, before its tables are created."""
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def read_version(connection: sqlite3.Connection) -> int:
    """Return the version of the tables; 0 for a new file."""
    return connection.execute("PRAGMA user_version").fetchone()[0]
