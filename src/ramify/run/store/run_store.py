"""An open run: rollouts and table rows in one directory.

One process at a time writes a run. It holds a file lock, which the system releases when the process ends, however it
ends. Readers share the lock while no process writes. A reader without the lock sees the last commit of a run that is
being written: SQLite isolates it, and traces are only ever appended.
"""

import asyncio
import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import msgspec

from ramify.core.errors import ConfigInvalid, DataCorrupt, RunBusy
from ramify.core.files import fsync_path
from ramify.core.watchdog import watch_storage
from ramify.run.store.image_store import MEDIA_DIR, ImageStore
from ramify.run.store.index import (
    DATABASE_NAME,
    ROLLOUT_TABLES,
    TRACES_DIR,
    FrameLocation,
    RolloutRecord,
    check_index_checksum,
    check_index_contents,
    check_index_file,
    check_index_pages,
    check_version,
    insert_rollout,
    is_corruption_error,
    make_damage_error,
    merge_write_ahead_log,
    remove_index_checksum,
    select_rollouts,
    set_version,
    write_index_checksum,
)
from ramify.run.store.locks import describe_holders, write_holder
from ramify.run.store.run_writer import RunWriter, storage_call, wrap_storage_errors
from ramify.run.store.segment_log import SegmentLog
from ramify.trace import Episode, Trace, decode_episode, encode_episode

T = TypeVar("T")

LOCK_NAME = "run.lock"

EpisodeData = Sequence[Trace] | bytes | memoryview  # the traces of a rollout, or its encoded episode
TableChange = Callable[[sqlite3.Connection], object]  # changes the tables inside a transaction; its result is ignored


class RunStore:
    """One run directory: rollouts with their traces, and facts about the run.

    Create it with `open`, and close it with `close` or a `with` statement. `path` is the directory, `segments` the log
    of encoded traces, `images` the images of all traces.
    """

    def __init__(
        self, path: Path, lock_fd: int | None, segments: SegmentLog, reader: sqlite3.Connection, write: bool
    ) -> None:
        self.path = path
        self.segments = segments
        self._lock_fd, self._reader = lock_fd, reader
        self.images = ImageStore(path / MEDIA_DIR)
        self._writer = RunWriter(path, segments, self.images, lambda: _connect(path)) if write else None

    @classmethod
    def open(cls, path: Path, *, write: bool = True, lock: bool = True, required_fact: str | None = None) -> Self:
        """Open the run at `path`. With `write`, create it if missing and truncate torn writes; else open it read-only.

        A reader without `lock` may open a run that is being written, and does not keep others from writing it. All that
        it reads is of one commit, the last when it was opened. It should close the run soon, because the write-ahead
        log of SQLite grows while a reader uses it.

        Raises RunDamaged if the directory holds results, but its index lists none of them: it has no tables, or it
        lacks the fact `required_fact`, which is the first that a new run stores. With `write`, the pages of the index
        and its checksum are checked too. Raises RunDamaged if another version of Ramify wrote the index.
        """
        with storage_call(path) as call:
            check_index_file(path)
            if (path / DATABASE_NAME).is_file():
                call.num_bytes = (path / DATABASE_NAME).stat().st_size  # all of it is checked
            if not write and not (path / DATABASE_NAME).is_file():
                raise ConfigInvalid(f"{path} is not a run: it has no {DATABASE_NAME}")
            if write:
                path.mkdir(parents=True, exist_ok=True)
            lock_fd = acquire_lock(path, write=write) if lock or write else None
            reader: sqlite3.Connection | None = None
            try:
                if write:
                    check_index_checksum(path)
                reader = _connect_readonly(path) if lock_fd is None else _connect(path)
                if write:
                    check_index_pages(path, reader)
                check_version(path / DATABASE_NAME, reader)  # first: another version may have other tables
                check_index_contents(path, reader, required_fact)
                segments = SegmentLog(path / TRACES_DIR)
                if write:
                    remove_index_checksum(path)
                    set_version(reader)
                    reader.executescript(ROLLOUT_TABLES)
                    segments.open(dict(reader.execute("SELECT number, length FROM segments")))
                    fsync_path(path)
                return cls(path, lock_fd, segments, reader, write)
            except BaseException as error:
                if reader is not None:
                    reader.close()
                if lock_fd is not None:
                    os.close(lock_fd)
                if is_corruption_error(error):
                    raise make_damage_error(path, str(error)) from error
                raise

    async def add_rollout(self, record: RolloutRecord, traces: Sequence[Trace]) -> None:
        """Store a rollout, or replace the one with its id. It is durable when this returns."""
        await asyncio.wrap_future(self.submit_change(lambda _: None, [(record, traces)]))

    def submit_change(
        self, apply: TableChange, rollouts: Sequence[tuple[RolloutRecord, EpisodeData]] = ()
    ) -> "Future[None]":
        """Queue a change to the tables, together with rollouts to store in the same transaction.

        The change is durable when the future is done. If `apply` raises, nothing is changed, and the future has its
        exception. Traces are encoded before this returns, so the caller may change them afterwards. The bytes of their
        images are moved out of them to the run's image store; an encoded episode must have none.
        """
        if self._writer is None:
            raise ConfigInvalid(f"{self.path} is open read-only")
        images = [
            image
            for _, data in rollouts
            if not isinstance(data, bytes | memoryview)
            for trace in data
            for image in trace.detach_images()
        ]
        frames = [_encode(data) for _, data in rollouts]
        rows = [(record, msgspec.msgpack.encode(record.summary)) for record, _ in rollouts]

        def apply_all(connection: sqlite3.Connection, locations: Sequence[FrameLocation]) -> None:
            for (record, summary), location in zip(rows, locations, strict=True):
                insert_rollout(connection, record, summary, location)
            apply(connection)

        return self._writer.submit(frames, apply_all, images)

    def select(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows that an SQL query finds in the last committed state of the tables."""
        with storage_call(self.path):
            return self._reader.execute(query, values).fetchall()

    def select_records(self, build: Callable[[tuple[Any, ...]], T], query: str, values: Sequence[Any] = ()) -> list[T]:
        """Return what `build` makes of each row that an SQL query finds.

        Raises RunDamaged if it raises an error: the row is not one that was written.
        """
        rows = self.select(query, values)
        try:
            return [build(row) for row in rows]
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise make_damage_error(self.path, f"a row of `{query}` cannot be decoded: {error}") from error

    def set_fact(self, key: str, value: Any) -> None:
        """Store plain data about the run under `key`; it is durable when this returns."""
        self.submit_change(build_fact_change(key, value)).result()

    def get_fact(self, key: str) -> Any:
        """Return what `set_fact` stored under `key`; None if there is nothing."""
        values = self.select_records(decode_column, "SELECT value FROM facts WHERE key = ?", (key,))
        return values[0] if values else None

    def rollouts(self, **filters: str | int) -> list[RolloutRecord]:
        """Return the rollouts whose columns (source, task, repetition, id) have these values."""
        return list(self.iter_rollouts(**filters))

    def iter_rollouts(self, **filters: str | int) -> Iterator[RolloutRecord]:
        """Yield the rollouts that `rollouts` returns, one after another."""
        condition = " AND ".join(f"{column} = ?" for column in filters) or "1"
        condition += " ORDER BY source, task, repetition, id"
        with wrap_storage_errors(self.path):
            yield from select_rollouts(self._reader, condition, *filters.values())

    def find_rollouts(self, prefix: str, limit: int) -> list[RolloutRecord]:
        """Return the rollout whose id is `prefix`; if there is none, the first `limit` whose ids begin with it."""
        condition, values = "id >= ? AND substr(id, 1, ?) = ? ORDER BY id LIMIT ?", (prefix, len(prefix), prefix, limit)
        with wrap_storage_errors(self.path):
            return self.rollouts(id=prefix) or list(select_rollouts(self._reader, condition, *values))

    def read_traces(self, rollout_id: str) -> Sequence[Trace]:
        """Return the traces of a rollout, one per agent. Raises KeyError if the run has no such rollout."""
        rows = self.select("SELECT segment, start, stop FROM rollouts WHERE id = ?", (rollout_id,))
        if not rows:
            raise KeyError(rollout_id)
        data = self.segments.read(FrameLocation(*rows[0]))
        try:
            return decode_episode(data).traces
        except DataCorrupt as error:
            raise DataCorrupt(f"rollout {rollout_id} in {self.path}: {error.message}") from error

    def close(self) -> None:
        """Commit what is queued, store the checksum of the index, and release the run."""
        is_merged = False
        try:
            if self._writer is not None:
                self._writer.close()
                with (
                    watch_storage(self.path),
                    contextlib.suppress(sqlite3.Error),  # what is committed is durable: only the checksum is missing
                ):
                    is_merged = merge_write_ahead_log(self._reader)
        finally:
            with watch_storage(self.path):
                self._reader.close()
                if is_merged:
                    write_index_checksum(self.path)
                if self._lock_fd is not None:
                    os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def decode_column(row: tuple[Any, ...]) -> Any:
    """Return the plain data that the only column of a row holds."""
    return msgspec.msgpack.decode(row[0])


def build_fact_change(key: str, value: Any) -> TableChange:
    """Return the change of the tables that `set_fact` makes, for a transaction that changes other tables too."""
    query, values = "INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, msgspec.msgpack.encode(value))
    return lambda connection: connection.execute(query, values)


def _encode(data: EpisodeData) -> bytes:
    return bytes(data) if isinstance(data, bytes | memoryview) else encode_episode(Episode(tuple(data)))


def _connect(path: Path) -> sqlite3.Connection:
    """Open the database such that commits survive a power failure."""
    connection = sqlite3.connect(path / DATABASE_NAME, isolation_level=None, timeout=30.0, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _connect_readonly(path: Path) -> sqlite3.Connection:
    """Open the database such that nothing can be written through this connection, and all of it is of one commit."""
    connection = sqlite3.connect(
        make_readonly_uri(path), uri=True, isolation_level=None, timeout=5.0, check_same_thread=False
    )
    connection.execute("BEGIN")
    return connection


def make_readonly_uri(path: Path) -> str:
    """Return the address of a run's database for a connection of SQLite that only reads.

    SQLite needs two files beside a database with a write-ahead log, even to read. In a directory where they neither
    exist nor can be made, such as an archived run's, nobody writes the run, and it is read without them.
    """
    file = path.absolute() / DATABASE_NAME
    is_archived = not os.access(path, os.W_OK) and not file.with_name(f"{DATABASE_NAME}-wal").exists()
    return f"file:{quote(os.fsencode(file))}?mode=ro{'&immutable=1' if is_archived else ''}"


def acquire_lock(path: Path, *, write: bool = True) -> int:
    """Lock the run and return the lock's file descriptor; closing it, or ending the process, releases the lock.

    Raises RunBusy if another process holds the lock.
    """
    fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if write else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if write:
            write_holder(fd)
    except BlockingIOError:
        holders = describe_holders(fd)
        os.close(fd)
        raise RunBusy(f"{path} is in use{f' by {holders}' if holders else ''}") from None
    except BaseException:
        os.close(fd)
        raise
    return fd
