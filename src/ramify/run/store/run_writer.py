"""The writer of a run: one thread that commits everything that was queued during the previous commit.

    change queued -> images stored -> frames appended -> segment synced -> transaction committed -> caller's future done

A sync takes milliseconds whether it covers one rollout or a hundred, so the writer commits all queued changes at once
(group commit). A change that fails is rolled back alone. If the disk is full, all changes of the commit fail, the files
are restored to their state before it, and the next commit is tried as usual.
"""

import contextlib
import errno
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from ramify.core.errors import StorageFailed, StorageFull
from ramify.core.watchdog import StorageCall, watch_storage
from ramify.run.store.image_store import ImageStore
from ramify.run.store.index import FrameLocation
from ramify.run.store.segment_log import SegmentLog
from ramify.trace import Media

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
MAX_CHANGES_PER_COMMIT = 1024  # bounds the latency of a commit

ApplyChange = Callable[[sqlite3.Connection, Sequence[FrameLocation]], None]


@dataclass(frozen=True, slots=True)
class PendingChange:
    """Frames to append, the change to the tables once their locations are known, and the future of the caller.

    `images` are those that the frames refer to; they are stored first.
    """

    frames: Sequence[bytes]
    apply: ApplyChange
    images: Sequence[Media] = ()
    future: "Future[None]" = field(default_factory=lambda: Future[None]())

    @property
    def num_bytes(self) -> int:
        """Bytes of the frames and the images."""
        return sum(len(data) for data in (*self.frames, *(image.data for image in self.images)))


class RunWriter:
    """A thread that owns the segments, the images and the writing connection of the run at `path`."""

    def __init__(
        self, path: Path, segments: SegmentLog, images: ImageStore, connect: Callable[[], sqlite3.Connection]
    ) -> None:
        self.path = path
        self._segments, self._images, self._connect = segments, images, connect
        self._queue: queue.SimpleQueue[PendingChange | None] = queue.SimpleQueue()
        self._thread_error: BaseException | None = None  # what stopped the thread; None while it runs or after `close`
        self._thread = threading.Thread(target=self._run, name=f"writer of {path.name}", daemon=True)
        self._thread.start()

    def submit(self, frames: Sequence[bytes], apply: ApplyChange, images: Sequence[Media] = ()) -> "Future[None]":
        """Queue a change; it is durable when the future is done. Cancelling the future in time withdraws the change.

        `apply` may be called twice: what it did the first time is then rolled back.
        """
        change = PendingChange(frames, apply, images)
        self._queue.put(change)
        if self._thread_error is not None:
            self._fail_queued(self._thread_error)
        return change.future

    def close(self) -> None:
        """Commit what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._commit_loop()
        except BaseException as error:  # noqa: BLE001 - the thread ends: all callers must get the error
            self._thread_error = to_storage_error(error, self.path)
            self._fail_queued(self._thread_error)

    def _fail_queued(self, error: BaseException) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                change = self._queue.get_nowait()
                if change is not None and change.future.set_running_or_notify_cancel():
                    change.future.set_exception(error)

    def _commit_loop(self) -> None:
        with watch_storage(self.path):
            connection = self._connect()
        try:
            is_open = True
            while is_open:
                queued, is_open = self._take_queued()
                changes = [change for change in queued if change.future.set_running_or_notify_cancel()]
                if changes:
                    with watch_storage(self.path, sum(change.num_bytes for change in changes)):
                        self._commit(connection, changes)
        finally:
            with watch_storage(self.path):
                connection.close()
                self._segments.close()

    def _take_queued(self) -> tuple[list[PendingChange], bool]:
        """Wait for a change, then return all that are queued, and whether the writer is still open."""
        items = [self._queue.get()]
        with contextlib.suppress(queue.Empty):
            while items[-1] is not None and len(items) < MAX_CHANGES_PER_COMMIT:
                items.append(self._queue.get_nowait())
        return [change for change in items if change is not None], items[-1] is not None

    def _commit(self, connection: sqlite3.Connection, changes: Sequence[PendingChange]) -> None:
        segments = self._segments
        segment_number, segment_length = segments.segment_number, segments.segment_length
        errors: Sequence[BaseException | None]
        try:
            self._images.write(image for change in changes for image in change.images)
            locations = [[segments.append(frame) for frame in change.frames] for change in changes]
            segments.sync()
            errors = _apply_changes(connection, changes, locations)
            connection.execute("COMMIT")
        except BaseException as error:  # noqa: BLE001 - all callers must get the error
            errors = [to_storage_error(error, self.path)] * len(changes)
            self._roll_back(connection, segment_number, segment_length)
        for change, error in zip(changes, errors, strict=True):
            if error is None:
                change.future.set_result(None)
            else:
                change.future.set_exception(error)

    def _roll_back(self, connection: sqlite3.Connection, segment_number: int, segment_length: int) -> None:
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        with contextlib.suppress(OSError):  # what cannot be truncated now is truncated when the run is opened again
            self._segments.truncate_to(segment_number, segment_length)


def to_storage_error(error: BaseException, path: Path) -> BaseException:
    """Return StorageFull or StorageFailed for an error of the disk or the database; any other error unchanged."""
    if is_disk_full(error):
        return StorageFull(f"{path} has no room: {error} ({_describe_free_space(path)}){_describe_kept_rollouts(path)}")
    if isinstance(error, OSError | sqlite3.Error):
        return StorageFailed(f"{path} cannot be used: {error}{_describe_kept_rollouts(path)}")
    return error


def _describe_kept_rollouts(path: Path) -> str:
    """Return a note that finished rollouts are kept, if there are any in the run that `path` is or lies in."""
    with contextlib.suppress(OSError):
        if any(file.stat().st_size for run in (path, *path.parents[:2]) for file in run.glob("traces/*.seg")):
            return "; what was finished is kept"
    return ""


def _describe_free_space(path: Path) -> str:
    try:
        free = os.statvfs(next(folder for folder in (path, *path.absolute().parents) if folder.exists()))
    except OSError as error:  # must not hide the error that is being described
        return f"free space unknown: {error.strerror}"
    return f"{free.f_bavail * free.f_frsize / 2**20:.1f} MiB free"


@contextlib.contextmanager
def wrap_storage_errors(path: Path) -> Generator[None]:
    """Raise errors of the disk or the database inside the block as StorageFull or StorageFailed."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise to_storage_error(error, path) from error


@contextlib.contextmanager
def storage_call(path: Path, num_bytes: int = 0) -> Generator[StorageCall]:
    """Do what `wrap_storage_errors` does, for one call on storage that may hang: the watchdog watches it."""
    with wrap_storage_errors(path), watch_storage(path, num_bytes) as call:
        yield call


def is_disk_full(error: BaseException) -> bool:
    """Return whether the disk, or the quota of this process, is full."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS


def _apply_changes(
    connection: sqlite3.Connection, changes: Sequence[PendingChange], locations: Sequence[Sequence[FrameLocation]]
) -> list[BaseException | None]:
    """Begin a transaction and apply all changes; return the error of each that was rolled back, or None.

    Failing changes are rare, so savepoints are used only if one fails: then everything is applied once more.
    """
    _begin_transaction(connection, locations)
    try:
        for change, change_locations in zip(changes, locations, strict=True):
            change.apply(connection, change_locations)
    except BaseException as error:
        if is_disk_full(error):
            raise
    else:
        return [None] * len(changes)
    connection.execute("ROLLBACK")
    _begin_transaction(connection, locations)
    return [
        _apply_in_savepoint(connection, change.apply, change_locations)
        for change, change_locations in zip(changes, locations, strict=True)
    ]


def _begin_transaction(connection: sqlite3.Connection, locations: Sequence[Sequence[FrameLocation]]) -> None:
    """Begin with the lengths of the segments: a change that reads the tables finds the frames of all rollouts."""
    connection.execute("BEGIN IMMEDIATE")
    lengths = {location.segment: location.stop for group in locations for location in group}
    connection.executemany("INSERT OR REPLACE INTO segments VALUES (?, ?)", lengths.items())


def _apply_in_savepoint(
    connection: sqlite3.Connection, apply: ApplyChange, locations: Sequence[FrameLocation]
) -> BaseException | None:
    """Apply one change. If it raises, roll back this change alone and return the error; a full disk raises it."""
    failure: BaseException | None = None
    connection.execute("SAVEPOINT change")
    try:
        apply(connection, locations)
    except BaseException as error:
        if is_disk_full(error):
            raise
        connection.execute("ROLLBACK TO change")
        failure = error
    connection.execute("RELEASE change")
    return failure
