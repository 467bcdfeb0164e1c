"""Archives on their way out of a sandbox, as `tar` writes them and as an agent may forge them."""

import io
import os
import shutil
import subprocess
import tarfile

import pytest

from ramify.rollout.runtime.shell_files import ArchiveTooLarge, pack_directory, unpack_archive


def make_archive(*entries):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, content in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.linkname = content
                archive.addfile(info)
    return buffer.getvalue()


def test_forged_archive_writes_only_regular_files_beneath_the_target(tmp_path):
    target, outside = tmp_path / "target", tmp_path / "outside"
    archive = make_archive(
        ("../outside", tarfile.REGTYPE, b"x"),
        (str(outside), tarfile.REGTYPE, b"x"),
        ("link", tarfile.SYMTYPE, str(tmp_path)),
        ("link/outside", tarfile.REGTYPE, b"x"),
        ("passwd", tarfile.LNKTYPE, "/etc/passwd"),
        ("pipe", tarfile.FIFOTYPE, ""),
        ("device", tarfile.CHRTYPE, ""),
        ("first", tarfile.REGTYPE, b"content"),
        ("second", tarfile.LNKTYPE, "first"),
    )
    unpack_archive(archive, target, 1000)
    assert not outside.exists()
    files = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert files == {"link/outside": b"x", "first": b"content", "second": b"content"}
    assert not any(path.is_symlink() for path in target.rglob("*"))


def test_archive_that_is_too_large_is_refused(tmp_path):
    entries = [(f"file{number}", tarfile.REGTYPE, b"x" * 600) for number in range(2)]
    with pytest.raises(ArchiveTooLarge, match="more than 1000 bytes"):
        unpack_archive(make_archive(*entries), tmp_path / "target", 1000)


def make_header(kind: bytes, content: bytes, size: int | None = None) -> bytes:
    info = tarfile.TarInfo("header")
    info.type, info.size = kind, len(content) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def make_pax_header(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    length += len(str(length + len(str(length))))
    return make_header(tarfile.XHDTYPE, b"%d %s=%s\n" % (length, key, value))


FILE = make_archive(("file", tarfile.REGTYPE, b"content"))
FORGED = {
    "a chain of headers": make_pax_header(b"path", b"x") * 5000 + FILE,
    "copies of a global header": make_header(tarfile.XGLTYPE, b"11 key=val\n" * 5000)
    + make_pax_header(b"a", b"b")
    + FILE,
    "an endless header": make_header(tarfile.XHDTYPE, bytes(1 << 17)),
    "a header of negative length": make_header(tarfile.XHDTYPE, b"-5 path=x\n"),
    "a record longer than its header": make_header(tarfile.XHDTYPE, b"99 path=x\n"),
    "a null byte in a name": make_pax_header(b"path", b"a\0b") + FILE,
    "less content than it says": make_header(tarfile.REGTYPE, b"x", size=1 << 40),
    "a negative size": make_header(tarfile.REGTYPE, b"", size=-512),
    "a sparse file": make_header(tarfile.GNUTYPE_SPARSE, b"x"),
    "no header": b"x" * 1024,
    "a deep directory": make_pax_header(b"path", b"a/" * 2000 + b"b") + FILE,
}


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED)
def test_forged_headers_are_refused_by_name_or_do_nothing(data, tmp_path):
    try:
        unpack_archive(data, tmp_path, 1000)
    except (tarfile.TarError, ArchiveTooLarge) as error:
        assert str(error)
    assert sum(len(files) for _, _, files in os.walk(tmp_path)) <= 1


def test_many_members_take_no_memory(tmp_path):
    member = make_archive(("directory", tarfile.DIRTYPE, ""))[:512]
    unpack_archive(member * 20_000, tmp_path, 1000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
@pytest.mark.parametrize("format", ["gnu", "posix", "ustar", "v7"])
def test_archives_of_tar_keep_names_modes_and_contents(format, tmp_path):
    if shutil.which("tar") is None:
        pytest.skip("no tar here")
    source, target = tmp_path / "source", tmp_path / "target"
    names = ["plain", "with space/and ü", *([] if format in ("ustar", "v7") else ["long/" * 30 + "name" * 60])]
    for name in names:
        file = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
        file.chmod(0o750)
    (source / "second").hardlink_to(source / "plain")
    command = ["tar", "-c", "-f", "-", f"--format={format}", "."]
    unpack_archive(subprocess.run(command, cwd=source, capture_output=True, check=True).stdout, target, 10_000)
    files = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert files == {**{name: name for name in names}, "second": "plain"}
    assert {(target / name).stat().st_mode & 0o777 for name in names} == {0o750}


def test_file_without_permissions_is_copied(tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("closed")
        info.mode, info.size = 0, 1
        archive.addfile(info, io.BytesIO(b"x"))
    unpack_archive(buffer.getvalue(), tmp_path / "target", 1000)
    assert (tmp_path / "target" / "closed").stat().st_mode & 0o777 == 0o600
    again = pack_directory(tmp_path / "target")
    unpack_archive(again, tmp_path / "copy", 1000)
    assert (tmp_path / "copy" / "closed").read_bytes() == b"x"
