"""Files and directories that are either complete or absent, and files that are on disk when a function returns.

A thread that hangs on storage cannot be ended. If its caller gives up, it may go on much later, in a process that has
repeated the work by then. So each change that others can see, such as a rename, is made in `unless_abandoned`, which
refuses the changes of an abandoned call.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Generator
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from ramify.core.errors import StorageFailed

T = TypeVar("T")


class AbandonableCall:
    """A call in a thread of its own whose caller may stop waiting for it."""

    def __init__(self) -> None:
        self._lock, self._is_abandoned, self._num_open_changes = threading.Lock(), False, 0

    def run(self, function: Callable[[], T]) -> T:
        """Call a function in this thread; `unless_abandoned` then belongs to this call."""
        _current_call.set(self)
        return function()

    def abandon(self) -> None:
        """Refuse further changes of the call. A change that has begun goes on."""
        with self._lock:
            self._is_abandoned = True

    @property
    def is_changing(self) -> bool:
        """Whether a change has begun and not ended."""
        return self._num_open_changes > 0

    @contextlib.contextmanager
    def unless_abandoned(self) -> Generator[None]:
        """Make a change that others can see, inside the block. Raises StorageFailed if the call was abandoned."""
        with self._lock:
            if self._is_abandoned and not self.is_changing:
                raise StorageFailed("the storage answered after its deadline; nothing was changed")
            self._num_open_changes += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open_changes -= 1


_current_call: ContextVar[AbandonableCall | None] = ContextVar("current_call", default=None)


def unless_abandoned() -> contextlib.AbstractContextManager[None]:
    """Make a change that others can see, inside the block. Raises StorageFailed if this thread's call was abandoned."""
    call = _current_call.get()
    return contextlib.nullcontext() if call is None else call.unless_abandoned()


@contextlib.contextmanager
def replace_file(path: Path) -> Generator[Path]:
    """Yield a path beside `path` to write to; at the end of the block, the file written there replaces `path`.

    If the block raises, `path` is unchanged and nothing is left beside it.
    """
    partial_path = _make_partial_path(path)
    try:
        yield partial_path
        with unless_abandoned():
            partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)


@contextlib.contextmanager
def create_directory(directory: Path) -> Generator[Path]:
    """Yield a new directory beside `directory`; at the end of the block it gets that name.

    If the block raises, the new directory is removed.
    """
    partial_path = _make_partial_path(directory)
    partial_path.mkdir(parents=True)
    try:
        yield partial_path
        with unless_abandoned():
            partial_path.rename(directory)
    except BaseException:
        shutil.rmtree(partial_path, ignore_errors=True)
        raise


def remove_directory(directory: Path) -> None:
    """Remove a directory, by a rename first, so that nobody sees a part of it.

    Another process may remove it at the same time; one of them succeeds, and for the other it is removed already.
    """
    trash_path = directory.with_name(f".{directory.name}.gone.partial")
    shutil.rmtree(trash_path, ignore_errors=True)  # of a removal that was interrupted
    with contextlib.suppress(FileNotFoundError), unless_abandoned():
        directory.rename(trash_path)
    shutil.rmtree(trash_path, ignore_errors=True)


def write_atomically(path: Path, data: bytes | memoryview | str) -> None:
    """Write a file that a reader sees either in full or not at all."""
    with replace_file(path) as partial_path:
        partial_path.write_bytes(data.encode() if isinstance(data, str) else data)


def get_free_bytes(path: Path) -> int | None:
    """Return the free bytes on the disk of `path`; None if the file system does not report its size."""
    usage = shutil.disk_usage(path)
    return usage.free if usage.total else None


def write_and_fsync(path: Path, data: bytes) -> None:
    """Write a file that is on disk when this returns."""
    path.write_bytes(data)
    fsync_path(path)


def mkdir_and_fsync(directory: Path) -> None:
    """Create a directory and its missing parents; their names are on disk when this returns."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Return when the contents of a file, or the names in a directory, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_partial_path(path: Path) -> Path:
    """Return a hidden path beside `path` that no other writer of `path` uses."""
    return path.with_name(f".{path.name}.{uuid4().hex}")
