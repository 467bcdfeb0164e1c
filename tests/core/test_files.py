"""Files that are complete or absent."""

import pytest

from ramify.core import files
from ramify.core.files import (
    create_directory,
    fsync_path,
    mkdir_and_fsync,
    remove_directory,
    replace_file,
    write_and_fsync,
    write_atomically,
)


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


def test_a_directory_that_another_process_removed_counts_as_removed(tmp_path):
    remove_directory(tmp_path / "gone")
    assert list(tmp_path.iterdir()) == []


def test_new_directories_are_synced_with_their_parents(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "fsync_path", synced.append)
    mkdir_and_fsync(tmp_path / "a" / "b")
    assert synced == [tmp_path / "a", tmp_path]
    mkdir_and_fsync(tmp_path / "a" / "b")
    assert len(synced) == 2


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


def test_two_writers_of_one_path_in_one_process_do_not_share_a_partial_file(tmp_path):
    path = tmp_path / "file.txt"
    with replace_file(path) as first, replace_file(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_directory_in_one_process_do_not_share_a_partial_directory(tmp_path):
    with pytest.raises(OSError, match="not empty"), create_directory(tmp_path / "new") as first:
        (first / "file").write_text("first")
        with create_directory(tmp_path / "new") as second:
            (second / "file").write_text("second")
    assert (tmp_path / "new" / "file").read_text() == "second"
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]


def test_a_removed_directory_leaves_nothing_behind(tmp_path):
    with create_directory(tmp_path / "old") as partial_path:
        (partial_path / "file").write_text("all")
    remove_directory(tmp_path / "old")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_removed_although_an_earlier_removal_was_interrupted(tmp_path, monkeypatch):
    for is_interrupted in (True, False):
        (tmp_path / "old" / "nested").mkdir(parents=True)
        with monkeypatch.context() as patch:
            if is_interrupted:
                patch.setattr(files.shutil, "rmtree", lambda path, **options: None)
            remove_directory(tmp_path / "old")
    assert list(tmp_path.iterdir()) == []
