"""Of several processes that create one name, one succeeds, and what it wrote is complete."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from ramify.core.errors import ProcessReplaced
from ramify.run.fencing import head_log
from ramify.run.fencing.head_log import DirectoryStore, HeadLog, LogPosition

NUM_NAMES, NUM_PROCESSES, SIZE = 40, 4, 10_000


def create_all(directory, process):
    """Try to create every name; return those that this process created."""
    store = DirectoryStore(directory)
    data = bytes([process]) * SIZE
    return [number for number in range(NUM_NAMES) if store.create(f"entries/{number}", data)]


@pytest.mark.process
@pytest.mark.promise
def test_each_name_is_created_once_and_complete(tmp_path):
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context) as pool:
        created = list(pool.map(create_all, [tmp_path] * NUM_PROCESSES, range(NUM_PROCESSES)))
    assert sorted(number for numbers in created for number in numbers) == list(range(NUM_NAMES))
    store = DirectoryStore(tmp_path)
    for process, numbers in enumerate(created):
        assert all(store.read(f"entries/{number}") == bytes([process]) * SIZE for number in numbers)
    assert not list((tmp_path / "entries").glob(".*"))


def test_missing_name_and_unusable_directory(tmp_path):
    assert DirectoryStore(tmp_path).read("term/0") is None
    (tmp_path / "term").write_text("a file")
    with pytest.raises(OSError, match="term"):
        DirectoryStore(tmp_path).create("term/0", b"")


def test_a_name_is_on_disk_with_its_directories_also_when_a_failed_creation_is_repeated(tmp_path, monkeypatch):
    synced: list[str] = []
    failures = [OSError("the storage does not answer")]

    def fsync(path) -> None:
        if path == tmp_path / "ledger" / "0" and failures:
            raise failures.pop()
        synced.append(str(path.relative_to(tmp_path)))

    monkeypatch.setattr(head_log, "fsync_path", fsync)
    with pytest.raises(OSError, match="does not answer"):
        DirectoryStore(tmp_path).create("ledger/0/5", b"data")
    synced.clear()
    assert not DirectoryStore(tmp_path).create("ledger/0/5", b"data")  # it exists, but who knows since when
    assert {"ledger/0/5", "ledger/0", "ledger", "."} <= set(synced)
    synced.clear()
    assert DirectoryStore(tmp_path).create("ledger/0/6", b"data")
    assert {"ledger/0", "ledger", "."} <= set(synced)


@pytest.mark.promise
def test_second_head_ends_the_first_one(tmp_path):
    log = HeadLog(DirectoryStore(tmp_path))
    first, _ = log.claim_term()
    log.append(LogPosition(first.term, 0), b"version 20")
    second, base = HeadLog(DirectoryStore(tmp_path)).claim_term()
    assert (second.term, base) == (1, LogPosition(0, 0))
    with pytest.raises(ProcessReplaced):
        log.append(LogPosition(first.term, 1), b"version 40")
    assert [data for _, data in log.iter_entries()] == [b"version 20"]
