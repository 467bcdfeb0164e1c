"""Files and directories that are either complete or absent, files that are on disk when a function returns, and locks.

The watchdog of the process ends it if one of these calls hangs.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from ramify.core.watchdog import watch_storage


@contextlib.contextmanager
def replace_file(path: Path) -> Generator[Path]:
    """Yield a path beside `path` to write to; at the end of the block, the file written there replaces `path`.

    If the block raises, `path` is unchanged and nothing is left beside it.
    """
    partial_path = _make_partial_path(path)
    try:
        yield partial_path
        with watch_storage(path):
            partial_path.replace(path)
    finally:
        with watch_storage(path):
            partial_path.unlink(missing_ok=True)


@contextlib.contextmanager
def create_directory(directory: Path) -> Generator[Path]:
    """Yield a new directory beside `directory`; at the end of the block it gets that name.

    If the block raises, the new directory is removed.
    """
    partial_path = _make_partial_path(directory)
    with watch_storage(directory):
        partial_path.mkdir(parents=True)
    try:
        yield partial_path
        with watch_storage(directory):
            partial_path.rename(directory)
    except BaseException:
        with watch_storage(directory):
            shutil.rmtree(partial_path, ignore_errors=True)
        raise


def remove_directory(directory: Path) -> None:
    """Remove a directory, by a rename first, so that nobody sees a part of it.

    Another process may remove it at the same time; one of them succeeds, and for the other it is removed already.
    """
    trash_path = directory.with_name(f".{directory.name}.gone.partial")
    with watch_storage(directory):
        shutil.rmtree(trash_path, ignore_errors=True)  # of a removal that was interrupted
        with contextlib.suppress(FileNotFoundError):
            directory.rename(trash_path)
        shutil.rmtree(trash_path, ignore_errors=True)


def write_atomically(path: Path, data: bytes | memoryview | str) -> None:
    """Write a file that a reader sees either in full or not at all."""
    content = data.encode() if isinstance(data, str) else data
    with watch_storage(path, len(content)), replace_file(path) as partial_path:
        partial_path.write_bytes(content)


def read_bytes(path: Path) -> bytes:
    """Return the content of a small file."""
    with watch_storage(path):
        return path.read_bytes()


def get_free_bytes(path: Path) -> int | None:
    """Return the free bytes on the disk of `path`; None if the file system does not report its size."""
    with watch_storage(path):
        usage = shutil.disk_usage(path)
    return usage.free if usage.total else None


def write_and_fsync(path: Path, data: bytes) -> None:
    """Write a file that is on disk when this returns."""
    with watch_storage(path, len(data)):
        path.write_bytes(data)
    fsync_path(path)


def mkdir_and_fsync(directory: Path) -> None:
    """Create a directory and its missing parents; their names are on disk when this returns."""
    with watch_storage(directory):
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Return when the contents of a file, or the names in a directory, are on disk."""
    with watch_storage(path):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def flock_with_timeout(file: int | IO[Any], operation: int, *, timeout: float, poll_interval: float) -> bool:
    """Lock an open file by `fcntl.flock`; return False if others still prevent that after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, operation | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_interval)


def _make_partial_path(path: Path) -> Path:
    """Return a hidden path beside `path` that no other writer of `path` uses."""
    return path.with_name(f".{path.name}.{uuid4().hex}")
