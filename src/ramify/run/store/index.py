"""Checks that the index of a run, `run.sqlite`, belongs to the files beside it.

When a run is opened for writing, everything that the index does not list is removed, because it is an unfinished write.
If the index was lost or emptied, that would remove all traces and checkpoints. So a directory that holds results but
whose index lists nothing is refused, before anything in it is changed.

SQLite keeps no checksums of its pages. So a writer that closes the run stores a checksum of the file beside it,
and the next writer removes it. A run whose writer was killed has none.
"""

import contextlib
import hashlib
import sqlite3
from pathlib import Path

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
