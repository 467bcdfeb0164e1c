"""Directories as tar archives, on their way into a box and out of it.

An archive that comes out of a box may be forged. `tarfile` follows chains of extended headers recursively, keeps every
header and copies global ones for each file, so a small archive can use up the stack or the memory. `unpack_archive`
therefore reads the few kinds of headers that `tar` writes for files, one at a time and within limits.
"""

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePath

from ramify.rollout.runtime.box_files import MAX_DEPTH, MAX_FILES

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

    A hard link becomes a copy. Files are readable for this user, whatever their mode in the box. Raises
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
