"""The files of a sandbox that has a shell: they are read and written by short shell scripts that run in the sandbox.

The rules are the same as in `sandbox_files`: regular files only, no links anywhere in a path, limited sizes. Here they
are not what keeps the machine safe, since the scripts run in the sandbox: a link leads to a file of the sandbox. What
comes out is an archive that an agent may have forged (see `archive`).
"""

import asyncio
import errno
import io
import os
import stat
import tarfile
from collections.abc import Awaitable, Iterator
from pathlib import Path, PurePath
from typing import Protocol

from ramify.core.errors import SandboxError
from ramify.env.runtime import ExecResult
from ramify.rollout.runtime.sandbox_files import COPY_CHUNK, MAX_DEPTH, MAX_FILES

# Directories as tar archives, on their way into a sandbox and out of it.
#
# An archive that comes out of a sandbox may be forged. `tarfile` follows chains of extended headers recursively, keeps
# every header and copies global ones for each file, so a small archive can use up the stack or the memory.
# `unpack_archive` therefore reads the few kinds of headers that `tar` writes for files, one at a time and within
# limits.

MAX_EXTENDED_HEADER_BYTES = 1 << 16  # a path has 4096 bytes at most
_TYPES_WITHOUT_CONTENT = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
)
_LONG_NAME_KEYS = {tarfile.GNUTYPE_LONGNAME: b"path", tarfile.GNUTYPE_LONGLINK: b"linkpath"}


class ArchiveTooLarge(Exception):
    """An archive has more files or bytes than are read; the message says which."""


def pack_directory(source: Path) -> bytes:
    """Return an archive of the regular files and directories beneath a directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in _iter_paths(source):
            info = tarfile.TarInfo(str(path.relative_to(source)))
            info.mode = stat.S_IMODE(path.stat().st_mode)
            if path.is_dir():
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                data = path.read_bytes()
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def unpack_archive(data: bytes, target: Path, max_bytes: int) -> None:
    """Write the regular files of an archive beneath a directory; leave out links and special files.

    A hard link becomes a copy. Files are readable for this user, whatever their mode in the sandbox. Raises
    ArchiveTooLarge, and tarfile.TarError if the archive is invalid.
    """
    num_bytes = num_files = 0
    written: dict[str, Path] = {}  # by the name in the archive, for hard links
    target.mkdir(parents=True, exist_ok=True)
    for member, content in _iter_members(data):
        relative = PurePath(member.name)
        if not relative.parts or relative.is_absolute() or ".." in relative.parts:
            continue
        if member.islnk() and member.linkname in written:
            content = written[member.linkname].read_bytes()
        elif not member.isreg():
            continue
        num_files, num_bytes = num_files + 1, num_bytes + len(content)
        if num_files > MAX_FILES:
            raise ArchiveTooLarge(f"more than {MAX_FILES} files")
        if num_bytes > max_bytes:
            raise ArchiveTooLarge(f"more than {max_bytes} bytes")
        if len(relative.parts) > MAX_DEPTH:
            raise ArchiveTooLarge(f"directories nested deeper than {MAX_DEPTH}")
        file = target / relative
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(member.mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
        written[member.name] = file


def _iter_members(data: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes | memoryview]]:
    """Yield the members of an archive with their contents; their long names come from the headers before them."""
    position, long_names = 0, dict[bytes, str]()
    while (block := data[position : position + tarfile.BLOCKSIZE]).strip(b"\0"):
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        size = 0 if member.type in _TYPES_WITHOUT_CONTENT else member.size
        start = position + tarfile.BLOCKSIZE
        if size < 0 or start + size > len(data) or member.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(f"{member.name!r:.80} is incomplete or sparse")
        content = memoryview(data)[start : start + size]
        position = start + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if member.type in _LONG_NAME_KEYS or member.type == tarfile.XHDTYPE:
            if size > MAX_EXTENDED_HEADER_BYTES:
                raise tarfile.ReadError(f"a header has {size} bytes, more than {MAX_EXTENDED_HEADER_BYTES}")
            long_names |= _parse_long_names(member.type, bytes(content))
        elif member.type != tarfile.XGLTYPE:
            member.name = long_names.pop(b"path", member.name)
            member.linkname = long_names.pop(b"linkpath", member.linkname)
            yield member, content


def _parse_long_names(kind: bytes, content: bytes) -> dict[bytes, str]:
    """Return the names that a GNU header, or a POSIX header of records `LENGTH KEY=VALUE`, gives to the next member."""
    if kind in _LONG_NAME_KEYS:
        return {_LONG_NAME_KEYS[kind]: os.fsdecode(content.split(b"\0")[0])}
    names: dict[bytes, str] = {}
    position = 0
    while position < len(content):
        length, _, rest = content[position : position + MAX_EXTENDED_HEADER_BYTES].partition(b" ")
        if not length.isdigit() or not len(length) < int(length[:6]) <= len(content) - position:
            raise tarfile.ReadError("a header has an invalid length")
        key, _, value = rest[: int(length[:6]) - len(length) - 2].partition(b"=")
        if b"\0" in value:
            raise tarfile.ReadError("a name has a null byte")
        if key in _LONG_NAME_KEYS.values():
            names[key] = os.fsdecode(value)
        position += int(length[:6])
    return names


def _iter_paths(source: Path) -> Iterator[Path]:
    for directory, directories, names in os.walk(source):
        for name in sorted(directories):
            yield Path(directory, name)
        for name in sorted(names):
            path = Path(directory, name)
            if path.is_file():
                yield path


NO_FILE_STATUS = 61
WRITE_FAILED_STATUS = 62
READ_FAILED_STATUS = 63
DATA_STATUS = 64  # a single file was copied out, which is not executable
PROGRAM_STATUS = 65  # the same, and it is executable
FILE_MODES = {DATA_STATUS: 0o644, PROGRAM_STATUS: 0o755}
ARCHIVE_OVERHEAD = 64 << 20  # bytes of headers that an archive may have besides the content of its files
KERNEL_DIRECTORIES = ("proc", "sys", "dev")  # file systems of the kernel; their files are not copied

# `check PATH` exits if a part of an absolute path is a link.
_CHECK = f"""
check() {{
    checked= rest=${{1#/}}
    while [ -n "$rest" ]; do
        checked=$checked/${{rest%%/*}}
        case $rest in */*) rest=${{rest#*/}};; *) rest=;; esac
        [ ! -L "$checked" ] || exit {NO_FILE_STATUS}
    done
}}
check "$1"
"""
READ_SCRIPT = f'{_CHECK}[ -f "$1" ] || exit {NO_FILE_STATUS}; exec head -c "$2" "$1"'
WRITE_SCRIPT = f"""{_CHECK}
[ ! -e "$1" ] || [ -f "$1" ] || exit {NO_FILE_STATUS}
mkdir -p "${{1%/*}}/" && cat > "$1" || exit {WRITE_FAILED_STATUS}
"""
UPLOAD_SCRIPT = f'{_CHECK}mkdir -p "$1" && tar -x -o -f - -C "$1" || exit {WRITE_FAILED_STATUS}'
DOWNLOAD_SCRIPT = f"""{_CHECK}
if [ -d "$1" ]; then cd "$1" && exec tar -c -f - .; fi
[ -f "$1" ] || exit {NO_FILE_STATUS}
head -c "$2" "$1" || exit {READ_FAILED_STATUS}
[ ! -x "$1" ] || exit {PROGRAM_STATUS}
exit {DATA_STATUS}
"""


class ScriptRunner(Protocol):
    """Runs a shell script in the sandbox and keeps `max_output` bytes of its output."""

    def __call__(self, script: str, *args: str, stdin: bytes | None, max_output: int) -> Awaitable[ExecResult]:
        """Return the result of the script."""
        ...


class ShellFiles:
    """The files of a sandbox.

    - `run_script`: runs a shell script in the sandbox.
    - `workdir`: the directory that relative paths refer to.
    - `max_mb`: most mebibytes of a file, or of a directory, that are read.
    """

    def __init__(self, run_script: ScriptRunner, workdir: PurePath, max_mb: float) -> None:
        self._run_script, self._workdir = run_script, workdir
        self._max_bytes = int(max_mb * (1 << 20))

    async def read(self, path: str | PurePath) -> bytes:
        """Return the content of a regular file. Raises FileNotFoundError if there is none, ValueError if too large."""
        limit = self._max_bytes + 1
        result = await self._run_script(READ_SCRIPT, self._resolve(path), str(limit), stdin=None, max_output=2 * limit)
        _raise_for_status(result, path)
        if len(result.stdout) >= limit:
            raise ValueError(f"{path} is larger than {self._max_bytes} bytes, the most that is read")
        return result.stdout

    async def write(self, path: str | PurePath, data: bytes) -> None:
        """Write a regular file, and create its parent directories."""
        result = await self._run_script(WRITE_SCRIPT, self._resolve(path), stdin=data, max_output=COPY_CHUNK)
        _raise_for_status(result, path)

    async def upload(self, source: Path, target: str | PurePath) -> None:
        """Copy the regular files and directories of a host directory into a directory of the sandbox."""
        archive = await asyncio.to_thread(pack_directory, source)
        result = await self._run_script(UPLOAD_SCRIPT, self._resolve(target), stdin=archive, max_output=COPY_CHUNK)
        _raise_for_status(result, target)

    async def download(self, source: str | PurePath, target: Path) -> None:
        """Copy a regular file, or the regular files of a directory, from the sandbox to a host path.

        Raises ValueError if the files are too large or too many.
        """
        limit, file_limit = self._max_bytes + ARCHIVE_OVERHEAD, self._max_bytes + 1
        args = (self._resolve(source), str(file_limit))
        result = await self._run_script(DOWNLOAD_SCRIPT, *args, stdin=None, max_output=2 * limit)
        if (mode := FILE_MODES.get(result.returncode)) is not None:
            if len(result.stdout) >= file_limit:
                raise ValueError(f"{source} is larger than {self._max_bytes} bytes, the most that is read")
            target.write_bytes(result.stdout)
            target.chmod(mode)
            return
        if result.returncode != 1:  # a file changed while it was read
            _raise_for_status(result, source)
        try:
            if len(result.stdout) >= limit:
                raise ArchiveTooLarge(f"more than {self._max_bytes} bytes")
            await asyncio.to_thread(unpack_archive, result.stdout, target, self._max_bytes)
        except ArchiveTooLarge as error:
            raise ValueError(f"{source} has {error}, the most that is read") from error
        except tarfile.TarError as error:
            raise OSError(errno.EIO, f"not an archive: {error}", str(source)) from error

    def _resolve(self, path: str | PurePath) -> str:
        """Return the absolute path. Raises FileNotFoundError for a path that climbs, or one of the kernel."""
        absolute = self._workdir / path  # an absolute `path` replaces the work directory
        parts = absolute.parts[1:]
        if not parts or ".." in parts or "\0" in str(path) or parts[0] in KERNEL_DIRECTORIES:
            raise FileNotFoundError(errno.ENOENT, "outside of the runtime", str(path))
        return str(absolute)


def _raise_for_status(result: ExecResult, path: str | PurePath) -> None:
    if result.returncode == NO_FILE_STATUS:
        raise FileNotFoundError(errno.ENOENT, "not a file or directory", str(path))
    if result.timed_out:
        raise SandboxError(f"copying {path} did not end in time")
    if result.returncode:
        reason = result.error_text.strip()[-500:]
        raise OSError(_find_errno(reason), reason or f"status {result.returncode}", str(path))


def _find_errno(reason: str) -> int:
    """Return the error number whose text a program of the sandbox wrote, or else EIO."""
    known = (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT)
    return next((number for number in known if os.strerror(number) in reason), errno.EIO)
