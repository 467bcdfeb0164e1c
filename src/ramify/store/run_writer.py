"""The one writer of a run: a thread that commits whatever has gathered while the last commit was on its way.

    change queued -> frames appended -> segment synced -> transaction committed -> waiting callers told

A sync costs milliseconds whether it covers one rollout or a hundred, so the writer takes everything that waits at once
(group commit). A caller is told when its own change is durable. A change that fails is undone alone; a disk that is
full fails all of the group, leaves the files as they were before it, and the next group is tried afresh.
"""

import contextlib
import errno
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from ramify.errors import DeadlineExceeded, StorageFailed, StorageFull
from ramify.store.rollout_table import FrameLocation
from ramify.store.segment_log import SegmentLog

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
MAX_CHANGES_PER_COMMIT = 1024  # changes in one transaction at most, so that nobody waits for a flood
CLOSE_TIMEOUT = 60.0  # seconds for what is queued when the writer is closed

ApplyChange = Callable[[sqlite3.Connection, Sequence[FrameLocation]], None]


@dataclass(frozen=True, slots=True)
class PendingChange:
    """Frames to append, and what to do to the tables once it is known where they lie."""

    frames: Sequence[bytes]
    apply: ApplyChange
    future: "Future[None]" = field(default_factory=lambda: Future[None]())


class RunWriter:
    """Owns the segments and the writing connection, in a thread of its own."""

    def __init__(self, path: Path, segments: SegmentLog, connect: Callable[[], sqlite3.Connection]) -> None:
        self.path = path
        self._segments, self._connect = segments, connect
        self._queue: queue.SimpleQueue[PendingChange | None] = queue.SimpleQueue()
        self._thread_error: BaseException | None = None  # what ended the thread, if not we
        self._thread = threading.Thread(target=self._run, name=f"writer of {path.name}", daemon=True)
        self._thread.start()

    def submit(self, frames: Sequence[bytes], apply: ApplyChange) -> "Future[None]":
        """Queue a change; the future is done when it is durable. One that is cancelled in time is never made."""
        change = PendingChange(frames, apply)
        self._queue.put(change)
        if self._thread_error is not None:
            self._fail_queued(self._thread_error)
        return change.future

    def close(self) -> None:
        """Commit what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            raise DeadlineExceeded(
                f"the writer of {self.path} did not finish within {CLOSE_TIMEOUT:g} s: the disk is stuck"
            )

    def _run(self) -> None:
        try:
            self._commit_loop()
        except BaseException as error:  # noqa: BLE001 - nobody will write any more: whoever waits has to be told
            self._thread_error = to_storage_error(error, self.path)
            self._fail_queued(self._thread_error)

    def _fail_queued(self, error: BaseException) -> None:
        """Fail all that is queued."""
        with contextlib.suppress(queue.Empty):
            while True:
                change = self._queue.get_nowait()
                if change is not None and change.future.set_running_or_notify_cancel():
                    change.future.set_exception(error)

    def _commit_loop(self) -> None:
        with contextlib.closing(self._connect()) as connection:
            open_ = True
            while open_:
                group, open_ = self._take_queued()
                group = [change for change in group if change.future.set_running_or_notify_cancel()]
                if group:
                    self._commit(connection, group)
            self._segments.close()

    def _take_queued(self) -> tuple[list[PendingChange], bool]:
        """Everything that waits, at least one change; and whether more may come."""
        found = [self._queue.get()]
        with contextlib.suppress(queue.Empty):
            while found[-1] is not None and len(found) < MAX_CHANGES_PER_COMMIT:
                found.append(self._queue.get_nowait())
        return [change for change in found if change is not None], found[-1] is not None

    def _commit(self, connection: sqlite3.Connection, changes: Sequence[PendingChange]) -> None:
        segments = self._segments
        number, length = segments.segment_number, segments.segment_length
        refused: dict[int, BaseException] = {}
        try:
            places = [[segments.append(frame) for frame in change.frames] for change in changes]
            segments.sync()
            connection.execute("BEGIN IMMEDIATE")
            for at, (change, where) in enumerate(zip(changes, places, strict=True)):
                _apply_in_savepoint(connection, change.apply, where, refused, at)
            for segment, stop in {place.segment: place.stop for where in places for place in where}.items():
                connection.execute("INSERT OR REPLACE INTO segments VALUES (?, ?)", (segment, stop))
            connection.execute("COMMIT")
        except BaseException as error:  # noqa: BLE001 - whoever waits has to be told
            failure = to_storage_error(error, self.path)
            self._roll_back(connection, number, length)
            for change in changes:
                change.future.set_exception(failure)
            return
        for at, change in enumerate(changes):
            if at in refused:
                change.future.set_exception(refused[at])
            else:
                change.future.set_result(None)

    def _roll_back(self, connection: sqlite3.Connection, segment_number: int, segment_length: int) -> None:
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        with contextlib.suppress(OSError):  # what cannot be cut now is cut when the run is opened again
            self._segments.truncate_to(segment_number, segment_length)


def to_storage_error(error: BaseException, path: Path) -> BaseException:
    """What an error of the disk or the database is called; errors of our own code stay what they are."""
    if is_disk_full(error):
        return StorageFull(f"{path} has no room: {error} ({_describe_free_space(path)}){_describe_kept_rollouts(path)}")
    if isinstance(error, OSError | sqlite3.Error):
        return StorageFailed(f"{path} cannot be used: {error}{_describe_kept_rollouts(path)}")
    return error


def _describe_kept_rollouts(path: Path) -> str:
    """Say that rollouts are kept where there are some: in the run that `path` is, or that it lies in."""
    with contextlib.suppress(OSError):
        if any(file.stat().st_size for run in (path, *path.parents[:2]) for file in run.glob("traces/*.seg")):
            return "; what was finished is kept"
    return ""


def _describe_free_space(path: Path) -> str:
    try:
        free = os.statvfs(next(folder for folder in (path, *path.absolute().parents) if folder.exists()))
    except OSError as error:  # a disk in trouble must not hide what the trouble is
        return f"how much is free cannot be told: {error.strerror}"
    return f"{free.f_bavail * free.f_frsize / 2**20:.1f} MiB free"


@contextlib.contextmanager
def wrap_storage_errors(path: Path) -> Iterator[None]:
    """Whatever disk or database raise inside has a name of ours outside."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise to_storage_error(error, path) from error


def is_disk_full(error: BaseException) -> bool:
    """Whether the storage has no room, or lets this process have no more of it."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS


def _apply_in_savepoint(
    connection: sqlite3.Connection,
    apply: ApplyChange,
    locations: Sequence[FrameLocation],
    errors: dict[int, BaseException],
    index: int,
) -> None:
    """Apply one change of a group; if it raises, undo it and leave the others alone."""
    connection.execute("SAVEPOINT change")
    try:
        apply(connection, locations)
    except BaseException as error:
        if is_disk_full(error):
            raise
        connection.execute("ROLLBACK TO change")
        errors[index] = error
    connection.execute("RELEASE change")
