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
from ramify.store.rows import Place
from ramify.store.segment import Segments

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
GROUP = 1024  # changes in one transaction at most, so that nobody waits for a flood
CLOSING = 60.0  # seconds for what is queued when the writer is closed

Apply = Callable[[sqlite3.Connection, Sequence[Place]], None]


@dataclass(frozen=True, slots=True)
class Change:
    """Frames to append, and what to do to the tables once it is known where they lie."""

    frames: Sequence[bytes]
    apply: Apply
    done: "Future[None]" = field(default_factory=lambda: Future[None]())


class Writer:
    """Owns the segments and the writing connection, in a thread of its own."""

    def __init__(self, path: Path, segments: Segments, connect: Callable[[], sqlite3.Connection]) -> None:
        self.path = path
        self._segments, self._connect = segments, connect
        self._queue: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._ended: BaseException | None = None  # what ended the thread, if not we
        self._thread = threading.Thread(target=self._run, name=f"writer of {path.name}", daemon=True)
        self._thread.start()

    def submit(self, frames: Sequence[bytes], apply: Apply) -> "Future[None]":
        """Queue a change; the future is done when it is durable. One that is cancelled in time is never made."""
        change = Change(frames, apply)
        self._queue.put(change)
        if self._ended is not None:
            self._refuse(self._ended)
        return change.done

    def close(self) -> None:
        """Commit what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the writer of {self.path} did not finish within {CLOSING:g} s: the disk is stuck")

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - nobody will write any more: whoever waits has to be told
            self._ended = named(error, self.path)
            self._refuse(self._ended)

    def _refuse(self, error: BaseException) -> None:
        """Fail all that is queued."""
        with contextlib.suppress(queue.Empty):
            while True:
                change = self._queue.get_nowait()
                if change is not None and change.done.set_running_or_notify_cancel():
                    change.done.set_exception(error)

    def _work(self) -> None:
        with contextlib.closing(self._connect()) as connection:
            open_ = True
            while open_:
                group, open_ = self._gather()
                group = [change for change in group if change.done.set_running_or_notify_cancel()]
                if group:
                    self._commit(connection, group)
            self._segments.close()

    def _gather(self) -> tuple[list[Change], bool]:
        """Everything that waits, at least one change; and whether more may come."""
        found = [self._queue.get()]
        with contextlib.suppress(queue.Empty):
            while found[-1] is not None and len(found) < GROUP:
                found.append(self._queue.get_nowait())
        return [change for change in found if change is not None], found[-1] is not None

    def _commit(self, connection: sqlite3.Connection, group: Sequence[Change]) -> None:
        segments = self._segments
        number, length = segments.number, segments.length
        refused: dict[int, BaseException] = {}
        try:
            places = [[segments.append(frame) for frame in change.frames] for change in group]
            segments.sync()
            connection.execute("BEGIN IMMEDIATE")
            for at, (change, where) in enumerate(zip(group, places, strict=True)):
                _apply(connection, change.apply, where, refused, at)
            for segment, stop in {place.segment: place.stop for where in places for place in where}.items():
                connection.execute("INSERT OR REPLACE INTO segments VALUES (?, ?)", (segment, stop))
            connection.execute("COMMIT")
        except BaseException as error:  # noqa: BLE001 - whoever waits has to be told
            failure = named(error, self.path)
            self._undo(connection, number, length)
            for change in group:
                change.done.set_exception(failure)
            return
        for at, change in enumerate(group):
            if at in refused:
                change.done.set_exception(refused[at])
            else:
                change.done.set_result(None)

    def _undo(self, connection: sqlite3.Connection, number: int, length: int) -> None:
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        with contextlib.suppress(OSError):  # what cannot be cut now is cut when the run is opened again
            self._segments.retreat(number, length)


def named(error: BaseException, path: Path) -> BaseException:
    """What an error of the disk or the database is called; errors of our own code stay what they are."""
    if is_full(error):
        return StorageFull(f"{path} has no room: {error} ({_room(path)}){_kept(path)}")
    if isinstance(error, OSError | sqlite3.Error):
        return StorageFailed(f"{path} cannot be used: {error}{_kept(path)}")
    return error


def _kept(path: Path) -> str:
    """Say that rollouts are kept where there are some: in the run that `path` is, or that it lies in."""
    with contextlib.suppress(OSError):
        if any(file.stat().st_size for run in (path, *path.parents[:2]) for file in run.glob("traces/*.seg")):
            return "; what was finished is kept"
    return ""


def _room(path: Path) -> str:
    try:
        free = os.statvfs(next(folder for folder in (path, *path.absolute().parents) if folder.exists()))
    except OSError as error:  # a disk in trouble must not hide what the trouble is
        return f"how much is free cannot be told: {error.strerror}"
    return f"{free.f_bavail * free.f_frsize / 2**20:.1f} MiB free"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever disk or database raise inside has a name of ours outside."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise named(error, path) from error


def is_full(error: BaseException) -> bool:
    """Whether the storage has no room, or lets this process have no more of it."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in FULL


def _apply(
    connection: sqlite3.Connection, apply: Apply, where: Sequence[Place], refused: dict[int, BaseException], at: int
) -> None:
    """Apply one change of a group; if it raises, undo it and leave the others alone."""
    connection.execute("SAVEPOINT change")
    try:
        apply(connection, where)
    except BaseException as error:
        if is_full(error):
            raise
        connection.execute("ROLLBACK TO change")
        refused[at] = error
    connection.execute("RELEASE change")
