"""A cache of replies on disk, one file for each request, which the processes of a machine share without locks.

A file appears under its name complete or not at all, so a process may be killed at any time. Reading a file makes it
the newest; the oldest are deleted when the cache is full.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

KEY_FORMAT = 1  # raised when keys or contents of the files change
KEPT_SHARE = 0.9  # of the maximum size, after the oldest files were deleted
SCAN_SHARE = 16  # files are counted again when this process has written the maximum size divided by this
TEMPORARY_SUFFIX = ".tmp"
MAX_TEMPORARY_AGE = 3600.0  # seconds; an older temporary file was left by a killed process

cache_directory: ContextVar[Path | None] = ContextVar("judge_cache_directory", default=None)
"""Where the judges of this process cache replies; None outside a run."""


def set_cache_directory(run_path: Path) -> None:
    """Let judges cache replies beside the run, so that its repetitions and other runs use them too."""
    cache_directory.set(run_path.absolute().parent / "judge-cache")


def compute_cache_key(request: Any) -> str:
    """Return the digest of a request: plain data, in which the order of lists counts."""
    return hashlib.sha256(msgspec.json.encode([KEY_FORMAT, request], order="deterministic")).hexdigest()


class ReplyCache:
    """The cached replies in `directory`, of at most `max_bytes` together."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._bytes_until_scan = 0  # the first file that is written may find a full cache
        self._numbers = itertools.count()

    async def read(self, key: str) -> str | None:
        """Return the cached reply; None if there is none."""
        return await asyncio.to_thread(self._read, key)

    async def write(self, key: str, reply: str) -> None:
        """Store a reply. If the disk fails, log a warning: the next process asks the model again."""
        try:
            await asyncio.to_thread(self._write, key, reply)
        except OSError as error:
            logging.getLogger(__name__).warning("the reply of a judge is not cached: %s", error)

    def _get_path(self, key: str) -> Path:
        return self._directory / key[:2] / f"{key}.json"

    def _read(self, key: str) -> str | None:
        path = self._get_path(key)
        try:
            reply = msgspec.json.decode(path.read_bytes(), type=str)
            os.utime(path)
        except (OSError, msgspec.DecodeError):  # a machine that lost power may leave an empty file
            return None
        return reply

    def _write(self, key: str, reply: str) -> None:
        path, data = self._get_path(key), msgspec.json.encode(reply)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary_path = path.with_name(f"{key}.{os.getpid()}.{next(self._numbers)}{TEMPORARY_SUFFIX}")
        temporary_path.write_bytes(data)
        temporary_path.replace(path)
        self._bytes_until_scan -= len(data)
        if self._bytes_until_scan < 0:
            self._bytes_until_scan = self._max_bytes // SCAN_SHARE
            self._delete_oldest()

    def _delete_oldest(self) -> None:
        """Delete the oldest files if the cache is full, and temporary files of killed processes."""
        files: list[tuple[float, int, Path]] = []
        for path in self._directory.glob("*/*"):
            with contextlib.suppress(OSError):  # another process deletes files too
                status = path.stat()
                if path.suffix != TEMPORARY_SUFFIX:
                    files.append((status.st_mtime, status.st_size, path))
                elif status.st_mtime < time.time() - MAX_TEMPORARY_AGE:
                    path.unlink()
        size = sum(size for _, size, _ in files)
        if size <= self._max_bytes:
            return
        for _, file_size, path in sorted(files):
            if size <= KEPT_SHARE * self._max_bytes:
                break
            size -= file_size
            with contextlib.suppress(OSError):
                path.unlink()
