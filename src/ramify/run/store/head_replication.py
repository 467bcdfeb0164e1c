"""Copies a run's ledger and traces to shared storage, commit by commit, so that another head can continue the run.

    collect changed rows -> store new trace bytes -> remember the digest of the entry -> create the entry -> confirm
    entry: sha256 (32 bytes) | zstd(msgpack(LogEntry))

The creation of the entry decides whether a commit counts (`ramify.run.fencing.head_log`). If the process dies before it
can confirm, the next one recognizes the entry by its digest. The same changes are then in the next entry too, which
does no harm.

Rows are in the entry itself. Traces and other files are cut into parts of at most PART_BYTES, which are stored under
their digests before the entry is created; the entry names them. A run is restored by applying its entries in order.
"""

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import msgspec
import zstandard

from ramify.core.async_calls import call_storage
from ramify.core.errors import ProcessReplaced, StorageFailed
from ramify.run.fencing.head_log import CreateOnceStore, HeadLog, LogPosition
from ramify.run.store.change_tracking import (
    HeadState,
    TableChanges,
    apply_changes,
    collect_changes,
    confirm_entry,
    read_head_state,
    set_pending_digest,
    skip_entry,
    start_tracking,
)
from ramify.run.store.index import DATABASE_NAME, read_version
from ramify.run.store.run_store import RunStore
from ramify.run.store.segment_log import ZSTD_LEVEL

PART_BYTES = 16 << 20
PARTS_DIR = "parts"  # in the shared directory
DIGEST_BYTES = 32
RETRY_TIME = 600.0  # seconds for which storage that raises errors is tried again, after which the run ends
RETRY_DELAY = 2.0  # seconds before a failed creation is tried again
POLL_INTERVAL = 5.0  # seconds between two checks for a newer head
FindGroupFile = Callable[[int], Path]  # by the number of a group; the file need not exist


class FilePart(msgspec.Struct, frozen=True):
    """Bytes [start, start + length) of a file, whose path is relative to the run directory."""

    path: str
    start: int
    length: int
    digest: str  # SHA-256 of the bytes, and their name in the shared directory


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of the tables, and the parts of files that were added. No two entries have the same `id`."""

    changes: TableChanges
    parts: list[FilePart]
    id: str = msgspec.field(default_factory=lambda: uuid4().hex)

    def encode(self) -> bytes:
        """Return the entry as bytes, with a checksum."""
        data = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(msgspec.msgpack.encode(self))
        return hashlib.sha256(data).digest() + data

    @classmethod
    def decode(cls, data: bytes, position: LogPosition) -> "LogEntry":
        """Return the entry that was encoded. Raises StorageFailed if it is damaged."""
        content = data[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != data[:DIGEST_BYTES]:
            name = f"ledger/{position.term}/{position.number}"
            raise StorageFailed(f"{name} is damaged: its content does not match its checksum; restore it from a copy")
        return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(content), type=cls)


def store_parts(store: CreateOnceStore, run: Path, path: Path, start: int, stop: int) -> Iterator[FilePart]:
    """Store bytes [start, stop) of a file of the run, and yield the parts. Raises OSError."""
    with path.open("rb") as file:
        file.seek(start)
        while start < stop:
            data = file.read(min(PART_BYTES, stop - start))
            if not data:
                raise StorageFailed(f"{path} has {start} bytes, expected {stop}: the disk lost synced data")
            part = FilePart(str(path.relative_to(run)), start, len(data), hashlib.sha256(data).hexdigest())
            store.create(_get_part_name(part.digest), data)  # if it exists, it has the same bytes
            yield part
            start += len(data)


def restore_part(store: CreateOnceStore, run: Path, part: FilePart) -> None:
    """Write a part to its file in the run directory. Raises OSError, or StorageFailed if the part is damaged."""
    name = _get_part_name(part.digest)
    data = store.read(name)
    if data is None or hashlib.sha256(data).hexdigest() != part.digest:
        problem = "is missing" if data is None else "is damaged"
        raise StorageFailed(f"{name} {problem}, and {part.path} cannot be restored without it; restore it from a copy")
    path = run / part.path
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    with os.fdopen(fd, "wb") as file:
        file.truncate(part.start)  # a file that was replaced is longer
        file.seek(part.start)
        file.write(data)
        file.flush()
        os.fsync(fd)


def _get_part_name(digest: str) -> str:
    return f"{PARTS_DIR}/{digest[:2]}/{digest}"


class HeadReplicator:
    """Creates the entries of one head, whose run directory `store` has open.

    `find_group_file` returns the file of a group beside the database, which is copied whenever the group has changed.
    """

    def __init__(
        self,
        store: RunStore,
        shared: CreateOnceStore,
        find_group_file: FindGroupFile | None = None,
        *,
        retry_time: float = RETRY_TIME,
    ) -> None:
        self._store, self._shared, self._log, self._find_group_file = store, shared, HeadLog(shared), find_group_file
        self._retry_time = retry_time
        self._lock = threading.Lock()  # one entry after another
        self._replaced_error: ProcessReplaced | None = None
        state = read_state(store)
        if state is None:
            raise StorageFailed(f"{store.path} has no log on shared storage; start the run with `ramify rl`")
        self._state = state

    @property
    def position(self) -> LogPosition:
        """The next entry of this head."""
        return LogPosition(self._state.term, self._state.next_entry)

    async def replicate(self) -> None:
        """Create an entry with all changes, if there are any; return when it exists.

        If the storage raises errors, it is tried again for RETRY_TIME seconds, then StorageFailed is raised. Raises
        ProcessReplaced if another head has taken over.
        """
        await call_storage(self.replicate_blocking, "head log")

    def replicate_blocking(self) -> None:
        """Do what `replicate` does, in this thread."""
        with self._lock:
            self._create_entry_with_retries()

    def _create_entry_with_retries(self) -> None:
        num_retries = 0
        while True:
            try:
                return self._create_entry()
            except ProcessReplaced as error:
                self._replaced_error = error
                raise
            except OSError as error:
                if num_retries * RETRY_DELAY >= self._retry_time:
                    problem = f"entry {self.position.number} of the head log cannot be created: {error}"
                    raise StorageFailed(f"{problem}; check the shared directory, then rerun the command") from error
                num_retries += 1
                time.sleep(RETRY_DELAY)

    async def watch_for_newer_head(self) -> None:
        """Check every POLL_INTERVAL seconds whether another head has taken over; raise ProcessReplaced if so.

        Raises StorageFailed when all checks of RETRY_TIME seconds have failed: otherwise a head that is cut off from
        the storage would run until its next commit beside a newer one.
        """
        num_failed = 0
        while self._replaced_error is None:
            await asyncio.sleep(POLL_INTERVAL)
            try:
                await call_storage(partial(self._log.check_not_ended, self.position), "newer head")
                num_failed = 0
            except OSError as error:
                num_failed += 1
                if num_failed * POLL_INTERVAL >= self._retry_time:
                    problem = f"the head log of {self._store.path} could not be read for {self._retry_time:g} s"
                    raise StorageFailed(f"{problem}; check the shared directory, then rerun the command") from error
        raise self._replaced_error

    def _create_entry(self) -> None:
        self._read_state_again()
        self._skip_pending_entry()
        changes, lengths = self._collect()
        if changes is None:
            return
        parts = [
            part
            for path, start, stop in self._list_new_bytes(changes, lengths)
            for part in store_parts(self._shared, self._store.path, path, start, stop)
        ]
        data = LogEntry(changes=changes, parts=parts).encode()
        digest = hashlib.sha256(data).hexdigest()
        self._change(lambda connection: set_pending_digest(connection, digest))
        self._state = self._state._replace(pending_digest=digest)
        self._log.append(self.position, data)
        segment = max(lengths, default=0)
        self._state = self._state._replace(
            next_entry=self._state.next_entry + 1,
            pending_digest="",
            segment=segment,
            segment_length=lengths.get(segment, 0),
            tables_version=changes.version,
        )
        self._change(lambda connection: confirm_entry(connection, self._state))

    def _read_state_again(self) -> None:
        """Read what is stored: if the last entry could not be confirmed, it is still pending there."""
        states: list[HeadState | None] = []
        self._change(lambda connection: states.append(read_head_state(connection)))
        assert states[-1] is not None
        self._state = states[-1]

    def _skip_pending_entry(self) -> None:
        """Continue after the pending entry, if it was created before its creator failed."""
        if self._state.pending_digest:
            data = self._log.read_entry(self.position)
            if data is not None and hashlib.sha256(data).hexdigest() == self._state.pending_digest:
                self._change(skip_entry)
                self._state = self._state._replace(next_entry=self._state.next_entry + 1, pending_digest="")

    def _collect(self) -> tuple[TableChanges | None, dict[int, int]]:
        """Return the changes, and the lengths of the trace segments, of one state of the tables."""
        results: list[tuple[HeadState | None, TableChanges | None, dict[int, int]]] = []

        def collect(connection: sqlite3.Connection) -> None:
            state = read_head_state(connection)  # with the generation before the one that begins now
            lengths = dict(connection.execute("SELECT number, length FROM segments"))
            results.append((state, collect_changes(connection), lengths))

        self._change(collect)
        state, changes, lengths = results[-1]
        assert state is not None
        self._state = state
        return changes, lengths

    def _list_new_bytes(self, changes: TableChanges, lengths: dict[int, int]) -> Iterator[tuple[Path, int, int]]:
        """Yield file, start and stop of what was written since the last entry."""
        for number, length in sorted(lengths.items()):
            start = self._state.segment_length if number == self._state.segment else 0
            if number >= self._state.segment and start < length:
                yield self._store.segments.get_path(number), start, length
        groups = changes.tables.get("groups")
        if groups is not None and self._find_group_file is not None:
            column = groups.columns.index("number")
            paths = [self._find_group_file(row[column]) for row in groups.rows]
            yield from ((path, 0, path.stat().st_size) for path in paths if path.exists())

    def _change(self, apply: Callable[[sqlite3.Connection], None]) -> None:
        self._store.submit_change(apply).result()


def start_replication(store: RunStore, term: int) -> None:
    """Track the changes of a run that has no log yet; its first entry will have all of it."""
    store.submit_change(lambda connection: start_tracking(connection, HeadState(term))).result()


def read_state(store: RunStore) -> HeadState | None:
    """Return the state of the head whose run directory is open; None if the run has no log."""
    is_tracked = store.select("SELECT 1 FROM sqlite_master WHERE name = 'head_log'")
    rows = store.select("SELECT * FROM head_log") if is_tracked else []
    return HeadState(*rows[0]) if rows else None


def restore_run(shared: CreateOnceStore, directory: Path, term: int) -> None:
    """Write database, traces and group files as of the last entry into `directory`, for the head of `term`.

    Raises StorageFailed if an entry or a part is missing or damaged.
    """
    directory.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(directory / DATABASE_NAME, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        for position, data in HeadLog(shared).iter_entries():
            entry = LogEntry.decode(data, position)
            apply_changes(connection, entry.changes)
            for part in entry.parts:
                restore_part(shared, directory, part)
        query = "SELECT number, length FROM segments ORDER BY number DESC LIMIT 1"
        segment, length = connection.execute(query).fetchone() or (0, 0)
        version = read_version(connection)
        start_tracking(connection, HeadState(term, segment=segment, segment_length=length, tables_version=version))
        connection.execute("COMMIT")
