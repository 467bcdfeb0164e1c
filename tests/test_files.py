"""Files that are complete or absent."""

import pytest

from ramify.files import create_directory, fsync_path, replace_file, write_and_fsync, write_atomically


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    with pytest.raises(RuntimeError), replace_file(path) as partial_path:
        partial_path.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    write_atomically(path, memoryview(b"new"))
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_files_and_directories_are_synced(tmp_path):
    write_and_fsync(tmp_path / "file", b"data")
    fsync_path(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"data"


def test_a_directory_appears_only_when_it_is_complete(tmp_path):
    directory = tmp_path / "models" / "new"
    with pytest.raises(RuntimeError), create_directory(directory) as partial_path:
        (partial_path / "file").write_text("half")
        raise RuntimeError
    assert list(directory.parent.iterdir()) == []
    with create_directory(directory) as partial_path:
        (partial_path / "file").write_text("all")
    assert (directory / "file").read_text() == "all"
    assert list(directory.parent.iterdir()) == [directory]
