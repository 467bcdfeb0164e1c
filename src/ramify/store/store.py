"""A run that is open: rows and traces in, durable when awaited; rows and traces out.

One process writes a run at a time, and the lock that says so ends with the process, however it ends. Readers share it
when nobody writes.
"""

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import msgspec

from ramify.errors import ConfigInvalid, RunBusy, TraceCorrupt
from ramify.store import rows
from ramify.store.index import DATABASE, TRACES, check_contents, check_file, check_pages, damage_error, is_corruption
from ramify.store.locks import name_holders, write_holder
from ramify.store.migrations import check_version, migrate, migrate_copy
from ramify.store.rows import Place, Row
from ramify.store.segment import Segments, sync_directory
from ramify.store.writer import Apply, Writer, naming
from ramify.trace import Episode, Trace, decode_episode, encode_episode

LOCK = "run.lock"
OPENING = 60.0  # seconds for a change that is waited for without a loop

Kept = Sequence[Trace] | bytes | memoryview  # a rollout's traces, or its episode as it was encoded


class RunStore:
    """One run directory. `open` it, `close` it (or `with`)."""

    def __init__(self, path: Path, lock: int, segments: Segments, reader: sqlite3.Connection, write: bool) -> None:
        self.path = path
        self._lock, self.segments, self._reader = lock, segments, reader
        self._writer = Writer(path, segments, lambda: _connect(path)) if write else None

    @classmethod
    def open(cls, path: Path, *, write: bool = True, required: str | None = None) -> Self:
        """Open the run at `path`: to write, made if it is not there, torn ends cut; or only to read.

        Raises RunDamaged if the directory holds results, but its index lists none of them: it has no tables, or it
        lacks the fact `required`, which is the first that a new run stores. With `write`, the pages of the index are
        checked too. Raises SchemaUnsupported if a later version of Ramify wrote the index; the tables of an earlier one
        are migrated, for a reader in a copy.
        """
        with naming(path):
            check_file(path)
            if not write and not (path / DATABASE).is_file():
                raise ConfigInvalid(f"{path} is no run: it has no {DATABASE}")
            if write:
                path.mkdir(parents=True, exist_ok=True)
            lock = locked(path, write=write)
            reader: sqlite3.Connection | None = None
            try:
                reader = _connect(path)
                if write:
                    check_pages(path, reader)
                check_contents(path, reader, required)
                check_version(path / DATABASE, reader)
                segments = Segments(path / TRACES)
                if not write:
                    reader = migrate_copy(reader)
                else:
                    migrate(reader)
                    reader.executescript(rows.SCHEMA)
                    segments.open(rows.lengths(reader))
                    sync_directory(path)
                return cls(path, lock, segments, reader, write)
            except BaseException as error:
                if reader is not None:
                    reader.close()
                os.close(lock)
                if is_corruption(error):
                    raise damage_error(path, str(error)) from error
                raise

    async def add(self, row: Row, traces: Sequence[Trace]) -> None:
        """Keep a rollout. It is durable when this returns; one with the same id is replaced."""
        await asyncio.wrap_future(self._submit(*_encoded(row, traces)))

    def change(self, apply: Apply, rollouts: Sequence[tuple[Row, Kept]] = ()) -> "Future[None]":
        """Queue a change to the tables, and rollouts that become part of the run together with it.

        Durable when the future is done; whatever `apply` raises is the future's exception, and nothing was changed.
        """
        kept = [_encoded(row, traces) for row, traces in rollouts]

        def all_of_it(connection: sqlite3.Connection, places: Sequence[Place]) -> None:
            for (_, keep), place in zip(kept, places, strict=True):
                keep(connection, [place])
            apply(connection, ())

        return self._submit([frame for frames, _ in kept for frame in frames], all_of_it)

    def select(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of the run's tables as they were last committed."""
        with naming(self.path):
            return self._reader.execute(query, values).fetchall()

    def remember(self, key: str, value: Any) -> None:
        """Keep a fact about the run as plain data; durable when this returns."""
        data = msgspec.msgpack.encode(value)

        def apply(connection: sqlite3.Connection, _: Sequence[Place]) -> None:
            connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, data))

        self._submit([], apply).result(OPENING)

    def fact(self, key: str) -> Any:
        """What was remembered under `key`; None if nothing was."""
        with naming(self.path):
            found = self._reader.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return None if found is None else msgspec.msgpack.decode(found[0])

    def rows(self, **where: str | int) -> list[Row]:
        """The rollouts whose columns (source, task, repetition, id) have these values."""
        with naming(self.path):
            return list(rows.select(self._reader, **where))

    def iterate_rows(self, **where: str | int) -> Iterator[Row]:
        """Yield the rollouts that `rows` returns, one after another."""
        with naming(self.path):
            yield from rows.select(self._reader, **where)

    def rows_beginning(self, prefix: str, limit: int) -> list[Row]:
        """Return the rollout whose id is `prefix`; without one, the first `limit` whose ids begin so."""
        with naming(self.path):
            return list(rows.select(self._reader, id=prefix)) or list(rows.select_prefix(self._reader, prefix, limit))

    def read(self, id: str) -> Sequence[Trace]:
        """The traces of a rollout, one per agent."""
        with naming(self.path):
            place = rows.place_of(self._reader, id)
        if place is None:
            raise KeyError(id)
        data = self.segments.read(place)
        try:
            return decode_episode(data).traces
        except TraceCorrupt as error:
            raise TraceCorrupt(f"rollout {id} in {self.path}: {error.message}") from error

    def close(self) -> None:
        """Commit what is queued and let go of the run."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._reader.close()
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, frames: Sequence[bytes], apply: Callable[[sqlite3.Connection, Sequence[Place]], None]) -> Any:
        if self._writer is None:
            raise ConfigInvalid(f"{self.path} was opened only to be read")
        return self._writer.submit(frames, apply)


def _encoded(row: Row, kept: Kept) -> tuple[list[bytes], Callable[[sqlite3.Connection, Sequence[Place]], None]]:
    """The rollout as bytes, taken now: the traces may change while the writer works."""
    frame = bytes(kept) if isinstance(kept, bytes | memoryview) else encode_episode(Episode(tuple(kept)))
    summary = msgspec.msgpack.encode(row.summary)
    return [frame], lambda connection, places: rows.put(connection, row, summary, places[0])


def _connect(path: Path) -> sqlite3.Connection:
    """A connection whose commits survive a power cut."""
    connection = sqlite3.connect(path / DATABASE, isolation_level=None, timeout=30.0, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def locked(path: Path, *, write: bool = True) -> int:
    """The run's lock, held until it is closed or the process is gone."""
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if write else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if write:
            write_holder(handle)
    except BlockingIOError:
        holders = name_holders(handle)
        os.close(handle)
        raise RunBusy(f"{path} is in use{f' by {holders}' if holders else ''}") from None
    except BaseException:
        os.close(handle)
        raise
    return handle
