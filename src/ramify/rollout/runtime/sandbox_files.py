"""The files of a runtime, as the host reads and writes them.

An agent may have put a link, a device or a named pipe wherever the host looks for a file. So every path is opened one
directory at a time, beneath an open root directory and without following links, and only regular files are read or
written. The sizes of what is read out are limited.
"""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Generator, Iterator
from pathlib import Path, PurePath
from typing import IO

# A directory that may be searched but not listed is opened too, where the system can.
DIRECTORY_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
SEARCH_FLAGS = DIRECTORY_FLAGS | getattr(os, "O_PATH", os.O_RDONLY)
FILE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a named pipe must not block
COPY_CHUNK = 1 << 20
MAX_FILES = 100_000  # in a directory that is copied out
MAX_DEPTH = 100  # of directories in it


class SandboxFiles:
    """The files beneath a root directory.

    - `root_fd`: the open root directory; `close` closes it.
    - `root`: its path as programs see it, for absolute paths.
    - `workdir`: the directory that relative paths refer to, relative to the root.
    - `max_mb`: most mebibytes of a file, or of a directory, that are read.
    """

    def __init__(self, root_fd: int, root: PurePath, workdir: PurePath, max_mb: float) -> None:
        self._root_fd, self._root, self._workdir = root_fd, root, workdir
        self._max_bytes = int(max_mb * (1 << 20))
        self._lock = threading.Lock()  # of `_root_fd`: the number of a closed file soon belongs to another

    def close(self) -> None:
        """Close the root directory. Closing it again does nothing. A thread may still read or write meanwhile."""
        with self._lock:
            root_fd, self._root_fd = self._root_fd, -1
            if root_fd >= 0:
                os.close(root_fd)

    def read(self, path: str | PurePath) -> bytes:
        """Return the content of a regular file. Raises FileNotFoundError if there is none, ValueError if too large."""
        with self._open_parent(path, create=False) as (directory_fd, name), _open_file(directory_fd, name) as file:
            data = file.read(self._max_bytes + 1)
        if len(data) > self._max_bytes:
            raise ValueError(f"{path} is larger than {self._max_bytes} bytes, the most that is read")
        return data

    def write(self, path: str | PurePath, data: bytes, *, mode: int = 0o666) -> None:
        """Write a regular file, and create its parent directories."""
        with (
            self._open_parent(path, create=True) as (directory_fd, name),
            _open_file(directory_fd, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode) as file,
        ):
            file.write(data)
            if mode != 0o666:
                os.fchmod(file.fileno(), mode)

    def make_directory(self, path: str | PurePath) -> None:
        """Create a directory and its parents, unless they exist."""
        with self._open_directory(self._get_parts(path), create=True):
            pass

    def upload(self, source: Path, target: str | PurePath) -> None:
        """Copy the regular files and directories of a host directory into a directory of the sandbox."""
        self.make_directory(target)
        for directory, directories, names in os.walk(source):
            relative = PurePath(target) / Path(directory).relative_to(source)
            for name in directories:
                self.make_directory(relative / name)
            for name in names:
                file = Path(directory) / name
                if file.is_file():
                    self.write(relative / name, file.read_bytes(), mode=stat.S_IMODE(file.stat().st_mode))

    def download(self, source: str | PurePath, target: Path) -> None:
        """Copy a regular file, or the regular files of a directory, from the sandbox to a host path.

        Raises ValueError if the files are too large or too many.
        """
        num_bytes = num_files = 0
        try:
            with self._open_parent(source, create=False) as (parent_fd, name), _open_file(parent_fd, name) as file:
                self._copy_file(file, target, self._max_bytes)
                return
        except FileNotFoundError:
            pass  # perhaps a directory
        with self._open_directory(self._get_parts(source), create=False) as directory_fd:
            target.mkdir(parents=True, exist_ok=True)
            for relative, file in _iter_files(directory_fd):
                num_files += 1
                if num_files > MAX_FILES:
                    raise ValueError(f"{source} has more than {MAX_FILES} files, the most that are read")
                (target / relative).parent.mkdir(parents=True, exist_ok=True)
                num_bytes += self._copy_file(file, target / relative, self._max_bytes - num_bytes)

    def _copy_file(self, file: IO[bytes], target: Path, max_bytes: int) -> int:
        """Copy an open file with its permissions; return its size. Raises ValueError if it is too large."""
        num_bytes = 0
        with target.open("wb") as copy:
            while chunk := file.read(COPY_CHUNK):
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise ValueError(f"{target.name}: more than {self._max_bytes} bytes, the most that is read")
                copy.write(chunk)
        target.chmod(stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777)
        return num_bytes

    def _get_parts(self, path: str | PurePath) -> tuple[str, ...]:
        """Return the directory names from the root to a path. Raises FileNotFoundError for a path outside of it."""
        absolute = self._root / self._workdir / path  # an absolute `path` replaces the others
        if not absolute.is_relative_to(self._root) or ".." in absolute.parts or "\0" in str(path):
            raise FileNotFoundError(errno.ENOENT, "outside of the runtime", str(path))
        return absolute.relative_to(self._root).parts

    @contextlib.contextmanager
    def _open_parent(self, path: str | PurePath, *, create: bool) -> Generator[tuple[int, str]]:
        parts = self._get_parts(path)
        if not parts:
            raise FileNotFoundError(errno.ENOENT, "not a file", str(path))
        with self._open_directory(parts[:-1], create=create) as directory_fd:
            yield directory_fd, parts[-1]

    @contextlib.contextmanager
    def _open_directory(self, parts: tuple[str, ...], *, create: bool) -> Generator[int]:
        """Open a directory beneath the root. Raises FileNotFoundError if a part is a link or a file."""
        with self._lock:
            directory_fd = os.dup(self._root_fd)
        try:
            for part in parts:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=directory_fd)
                try:
                    next_fd = os.open(part, SEARCH_FLAGS, dir_fd=directory_fd)
                except NotADirectoryError as error:
                    raise FileNotFoundError(errno.ENOENT, "not a directory", part) from error
                os.close(directory_fd)
                directory_fd = next_fd
            yield directory_fd
        finally:
            os.close(directory_fd)


def _open_file(directory_fd: int, name: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> IO[bytes]:
    """Open a regular file of a directory. Raises FileNotFoundError for a link or a special file."""
    try:
        fd = os.open(name, flags | FILE_FLAGS, mode, dir_fd=directory_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link, a pipe or a socket, a directory
            raise FileNotFoundError(errno.ENOENT, "not a file", name) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "not a file", name)
    return os.fdopen(fd, "rb" if flags == os.O_RDONLY else "wb")


def _iter_files(directory_fd: int) -> Iterator[tuple[PurePath, IO[bytes]]]:
    """Yield the regular files beneath a directory with their relative paths; each is closed afterwards."""
    for directory, directories, names, fd in os.fwalk(".", dir_fd=directory_fd, follow_symlinks=False):
        if directories and len(PurePath(directory).parts) >= MAX_DEPTH:  # each level is an open file and a stack frame
            raise ValueError(f"directories are nested deeper than {MAX_DEPTH}, the most that is read")
        for name in sorted(names):
            with contextlib.suppress(FileNotFoundError), _open_file(fd, name) as file:
                yield PurePath(directory) / name, file
