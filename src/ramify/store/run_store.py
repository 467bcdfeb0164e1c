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
from ramify.store import rollout_table
from ramify.store.index import (
    DATABASE_NAME,
    TRACES_DIR,
    check_index_contents,
    check_index_file,
    check_index_pages,
    is_corruption_error,
    make_damage_error,
)
from ramify.store.locks import describe_holders, write_holder
from ramify.store.migrations import check_version, migrate, migrate_copy
from ramify.store.rollout_table import FrameLocation, RolloutRecord
from ramify.store.run_writer import ApplyChange, RunWriter, wrap_storage_errors
from ramify.store.segment_log import SegmentLog, fsync_directory
from ramify.trace import Episode, Trace, decode_episode, encode_episode

LOCK_NAME = "run.lock"
BLOCKING_CHANGE_TIMEOUT = 60.0  # seconds for a change that is waited for without a loop

EpisodeData = Sequence[Trace] | bytes | memoryview  # a rollout's traces, or its episode as it was encoded


class RunStore:
    """One run directory. `open` it, `close` it (or `with`)."""

    def __init__(self, path: Path, lock_fd: int, segments: SegmentLog, reader: sqlite3.Connection, write: bool) -> None:
        self.path = path
        self._lock_fd, self.segments, self._reader = lock_fd, segments, reader
        self._writer = RunWriter(path, segments, lambda: _connect(path)) if write else None

    @classmethod
    def open(cls, path: Path, *, write: bool = True, required_fact: str | None = None) -> Self:
        """Open the run at `path`: to write, made if it is not there, torn ends cut; or only to read.

        Raises RunDamaged if the directory holds results, but its index lists none of them: it has no tables, or it
        lacks the fact `required`, which is the first that a new run stores. With `write`, the pages of the index are
        checked too. Raises SchemaUnsupported if a later version of Ramify wrote the index; the tables of an earlier one
        are migrated, for a reader in a copy.
        """
        with wrap_storage_errors(path):
            check_index_file(path)
            if not write and not (path / DATABASE_NAME).is_file():
                raise ConfigInvalid(f"{path} is no run: it has no {DATABASE_NAME}")
            if write:
                path.mkdir(parents=True, exist_ok=True)
            lock = acquire_lock(path, write=write)
            reader: sqlite3.Connection | None = None
            try:
                reader = _connect(path)
                if write:
                    check_index_pages(path, reader)
                check_index_contents(path, reader, required_fact)
                check_version(path / DATABASE_NAME, reader)
                segments = SegmentLog(path / TRACES_DIR)
                if not write:
                    reader = migrate_copy(reader)
                else:
                    migrate(reader)
                    reader.executescript(rollout_table.ROLLOUT_TABLES)
                    segments.open(rollout_table.segment_lengths(reader))
                    fsync_directory(path)
                return cls(path, lock, segments, reader, write)
            except BaseException as error:
                if reader is not None:
                    reader.close()
                os.close(lock)
                if is_corruption_error(error):
                    raise make_damage_error(path, str(error)) from error
                raise

    async def add_rollout(self, record: RolloutRecord, traces: Sequence[Trace]) -> None:
        """Keep a rollout. It is durable when this returns; one with the same id is replaced."""
        await asyncio.wrap_future(self._submit(*_encode_rollout(record, traces)))

    def submit_change(
        self, apply: ApplyChange, rollouts: Sequence[tuple[RolloutRecord, EpisodeData]] = ()
    ) -> "Future[None]":
        """Queue a change to the tables, and rollouts that become part of the run together with it.

        Durable when the future is done; whatever `apply` raises is the future's exception, and nothing was changed.
        """
        kept = [_encode_rollout(row, traces) for row, traces in rollouts]

        def apply_all(connection: sqlite3.Connection, places: Sequence[FrameLocation]) -> None:
            for (_, keep), place in zip(kept, places, strict=True):
                keep(connection, [place])
            apply(connection, ())

        return self._submit([frame for frames, _ in kept for frame in frames], apply_all)

    def select(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of the run's tables as they were last committed."""
        with wrap_storage_errors(self.path):
            return self._reader.execute(query, values).fetchall()

    def set_fact(self, key: str, value: Any) -> None:
        """Keep a fact about the run as plain data; durable when this returns."""
        data = msgspec.msgpack.encode(value)

        def apply(connection: sqlite3.Connection, _: Sequence[FrameLocation]) -> None:
            connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, data))

        self._submit([], apply).result(BLOCKING_CHANGE_TIMEOUT)

    def get_fact(self, key: str) -> Any:
        """What was remembered under `key`; None if nothing was."""
        with wrap_storage_errors(self.path):
            found = self._reader.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return None if found is None else msgspec.msgpack.decode(found[0])

    def rollouts(self, **filters: str | int) -> list[RolloutRecord]:
        """The rollouts whose columns (source, task, repetition, id) have these values."""
        with wrap_storage_errors(self.path):
            return list(rollout_table.select_rollouts(self._reader, **filters))

    def iter_rollouts(self, **filters: str | int) -> Iterator[RolloutRecord]:
        """Yield the rollouts that `rows` returns, one after another."""
        with wrap_storage_errors(self.path):
            yield from rollout_table.select_rollouts(self._reader, **filters)

    def find_rollouts(self, prefix: str, limit: int) -> list[RolloutRecord]:
        """Return the rollout whose id is `prefix`; without one, the first `limit` whose ids begin so."""
        with wrap_storage_errors(self.path):
            return list(rollout_table.select_rollouts(self._reader, id=prefix)) or list(
                rollout_table.select_by_id_prefix(self._reader, prefix, limit)
            )

    def read_traces(self, rollout_id: str) -> Sequence[Trace]:
        """The traces of a rollout, one per agent."""
        with wrap_storage_errors(self.path):
            place = rollout_table.find_location(self._reader, rollout_id)
        if place is None:
            raise KeyError(rollout_id)
        data = self.segments.read(place)
        try:
            return decode_episode(data).traces
        except TraceCorrupt as error:
            raise TraceCorrupt(f"rollout {rollout_id} in {self.path}: {error.message}") from error

    def close(self) -> None:
        """Commit what is queued and let go of the run."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._reader.close()
            os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(
        self, frames: Sequence[bytes], apply: Callable[[sqlite3.Connection, Sequence[FrameLocation]], None]
    ) -> Any:
        if self._writer is None:
            raise ConfigInvalid(f"{self.path} was opened only to be read")
        return self._writer.submit(frames, apply)


def _encode_rollout(
    record: RolloutRecord, data: EpisodeData
) -> tuple[list[bytes], Callable[[sqlite3.Connection, Sequence[FrameLocation]], None]]:
    """The rollout as bytes, taken now: the traces may change while the writer works."""
    frame = bytes(data) if isinstance(data, bytes | memoryview) else encode_episode(Episode(tuple(data)))
    summary = msgspec.msgpack.encode(record.summary)
    return [frame], lambda connection, places: rollout_table.insert_rollout(connection, record, summary, places[0])


def _connect(path: Path) -> sqlite3.Connection:
    """A connection whose commits survive a power cut."""
    connection = sqlite3.connect(path / DATABASE_NAME, isolation_level=None, timeout=30.0, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def acquire_lock(path: Path, *, write: bool = True) -> int:
    """The run's lock, held until it is closed or the process is gone."""
    handle = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if write else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if write:
            write_holder(handle)
    except BlockingIOError:
        holders = describe_holders(handle)
        os.close(handle)
        raise RunBusy(f"{path} is in use{f' by {holders}' if holders else ''}") from None
    except BaseException:
        os.close(handle)
        raise
    return handle
