"""A run is restored from shared storage as it was at its last entry, wherever the head was interrupted."""

import asyncio
import contextlib
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ramify.core.errors import ProcessReplaced, StorageFailed
from ramify.run.fencing.head_log import DirectoryStore, HeadLog
from ramify.run.store import RunStore, head_replication
from ramify.run.store.audit import audit, check_storage
from ramify.run.store.head_replication import HeadReplicator, LogEntry, restore_run, start_replication
from ramify.run.store.ledger import Ledger
from tests.support.fencing_simulation import Storage
from tests.support.ledgers import (
    commit,
    commit_step,
    issue,
    issue_and_score,
    record_batch,
    run_all,
    sample,
    states,
)
from tests.support.traces import make_rollout, read_replies

pytestmark = pytest.mark.promise

TABLES = ("facts", "segments", "rollouts", "events", "marks", "states", "groups", "attempts", "batches", "commits")


class FailingStorage(Storage):
    """Storage that fails a creation before or after it was made."""

    def __init__(self):
        super().__init__()
        self.failures = []

    def create(self, name, data):
        failure = self.failures.pop(0) if self.failures else None
        if failure == "before":
            raise OSError("the mount is gone")
        is_created = super().create(name, data)
        if failure == "after":
            raise OSError("the answer was lost")
        return is_created


@pytest.fixture
def shared():
    return FailingStorage()


@contextlib.contextmanager
def open_head(path: Path, shared, **settings):
    """Open a run, in its first term if it is new, with a ledger whose commits are replicated."""
    with RunStore.open(path) as store:
        ledger = Ledger.open(store)
        if head_replication.read_state(store) is None:
            start_replication(store, HeadLog(shared).claim_term()[0].term)
        replicator = HeadReplicator(store, shared, lambda number: path / "top_logprobs" / f"{number}.bin", **settings)
        ledger.replicate = replicator.replicate
        yield ledger


def dump(store):
    return {table: store.select(f"SELECT * FROM {table}") for table in TABLES}


def assert_restored(shared, tmp_path, committed):
    """Restore the run from the shared storage, and compare it with what was committed."""
    restore_run(shared, tmp_path / "restored", term=1)
    with RunStore.open(tmp_path / "restored") as store:
        assert dump(store) == committed
        assert check_storage(store) == []


def count_entries(shared):
    return len(list(HeadLog(shared).iter_entries()))


def test_restored_run_is_the_run_at_its_last_commit(tmp_path, shared):
    with open_head(tmp_path / "run", shared) as ledger:
        ledger.store.set_fact("identity", {"model": "tiny"})
        commit_step(ledger, 0, 0, 1)
        commit_step(ledger, 1, 2, 3)
        issue_and_score(ledger, 4)  # scored, but in no batch
        issue(ledger, 5)
        sample(ledger, 5, 0)
        commit_step(ledger, 2, 6)
        committed, texts = dump(ledger.store), read_replies(ledger.store)
        sample(ledger, 5, 1)  # after the last commit: it is sampled again
    assert count_entries(shared) == 3
    restore_run(shared, tmp_path / "restored", term=1)
    with RunStore.open(tmp_path / "restored") as store:
        assert dump(store) == committed
        assert read_replies(store) == texts
        assert (check_storage(store), audit(Ledger.open_readonly(store), finished=False)) == ([], [])
        assert head_replication.read_state(store).term == 1
        assert states(Ledger.open_readonly(store))[5] == "issued"


def test_entries_hold_only_what_changed(tmp_path, shared):
    with open_head(tmp_path / "run", shared) as ledger:
        for step in range(5):
            commit_step(ledger, step, step)
    entries = [LogEntry.decode(data, position) for position, data in HeadLog(shared).iter_entries()]
    assert [len(entry.changes.tables["groups"].rows) for entry in entries] == [1] * 5
    assert [len(entry.changes.tables["rollouts"].rows) for entry in entries] == [2] * 5
    starts = [part.start for entry in entries for part in entry.parts]
    assert starts == sorted(set(starts))  # every byte of a segment is stored once


def test_commit_returns_after_its_entry_and_may_be_repeated(tmp_path, shared, monkeypatch):
    monkeypatch.setattr(head_replication, "RETRY_DELAY", 0.01)
    with open_head(tmp_path / "run", shared) as ledger:
        shared.failures = [None, "before", "after", "before", "after"]
        commit_step(ledger, 0, 0)
        assert not shared.failures
        commit(ledger, 1)
        commit_step(ledger, 1, 1)
        committed = dump(ledger.store)
    assert_restored(shared, tmp_path, committed)


def test_storage_that_stays_away_fails_the_commit_by_name(tmp_path, shared, monkeypatch):
    monkeypatch.setattr(head_replication, "RETRY_DELAY", 0.01)
    with open_head(tmp_path / "run", shared, retry_time=0.05) as ledger:
        shared.failures = ["before"] * 1000
        with pytest.raises(StorageFailed, match="entry 0 of the head log cannot be created: the mount is gone"):
            commit_step(ledger, 0, 0)


def test_entry_that_could_not_be_confirmed_is_recognized_by_the_same_head(tmp_path, shared, monkeypatch):
    def fail(connection, state):
        raise TimeoutError("the disk is busy")

    with open_head(tmp_path / "run", shared, retry_time=0.0) as ledger:  # fail at once
        with monkeypatch.context() as patch, pytest.raises(StorageFailed, match="the disk is busy"):
            patch.setattr(head_replication, "confirm_entry", fail)
            commit_step(ledger, 0, 0)
        commit_step(ledger, 1, 1)
        committed = dump(ledger.store)
    assert_restored(shared, tmp_path, committed)


@pytest.mark.parametrize("moment", ["before the entry", "after the entry"])
def test_head_that_died_while_it_created_an_entry_continues_on_its_disk(tmp_path, shared, monkeypatch, moment):
    class Died(BaseException):
        pass

    with open_head(tmp_path / "run", shared) as ledger:
        commit_step(ledger, 0, 0)
        append = HeadLog.append

        def die(self, position, data):
            if moment == "after the entry":
                append(self, position, data)
            raise Died

        monkeypatch.setattr(HeadLog, "append", die)
        with pytest.raises(Died):
            commit_step(ledger, 1, 1)
        monkeypatch.undo()
    with open_head(tmp_path / "run", shared) as ledger:
        assert ledger.progress().committed == 2
        run_all(ledger.replicate())
        commit_step(ledger, 2, 2)
        committed = dump(ledger.store)
    assert_restored(shared, tmp_path, committed)


def test_replaced_head_cannot_commit(tmp_path, shared, monkeypatch):
    monkeypatch.setattr(head_replication, "POLL_INTERVAL", 0.01)
    with open_head(tmp_path / "run", shared) as ledger:
        commit_step(ledger, 0, 0)
        HeadLog(shared).claim_term()
        with pytest.raises(ProcessReplaced, match="term 0 was ended at entry 1: a newer head took over"):
            commit_step(ledger, 1, 1)
        with pytest.raises(ProcessReplaced):  # also a head that commits nothing
            asyncio.run(asyncio.wait_for(HeadReplicator(ledger.store, shared).watch_for_newer_head(), 10))
    assert count_entries(shared) == 1


def test_head_that_is_cut_off_from_the_storage_ends_although_it_commits_nothing(tmp_path, shared, monkeypatch):
    monkeypatch.setattr(head_replication, "POLL_INTERVAL", 0.01)

    def fail(name):
        raise OSError("the mount is gone")

    with open_head(tmp_path / "run", shared) as ledger:
        replicator = HeadReplicator(ledger.store, shared, retry_time=0.3)
        shared.read = fail
        with pytest.raises(StorageFailed, match=r"head log of .*run could not be read for 0.3 s; check the shared"):
            asyncio.run(asyncio.wait_for(replicator.watch_for_newer_head(), 10))


def test_copied_run_directory_cannot_commit_beside_the_first_one(tmp_path, shared):
    with open_head(tmp_path / "run", shared) as ledger:
        commit_step(ledger, 0, 0)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with open_head(tmp_path / "run", shared) as ledger:
        commit_step(ledger, 1, 1)
    with open_head(tmp_path / "copy", shared) as ledger, pytest.raises(ProcessReplaced):
        commit_step(ledger, 1, 1)


def test_files_of_groups_are_restored(tmp_path, shared):
    with open_head(tmp_path / "run", shared) as ledger:
        (tmp_path / "run/top_logprobs").mkdir()
        (tmp_path / "run/top_logprobs/0.bin").write_bytes(b"likeliest tokens")
        commit_step(ledger, 0, 0)
        (tmp_path / "run/top_logprobs/1.bin").write_bytes(b"of the next group")
        commit_step(ledger, 1, 1)
    restore_run(shared, tmp_path / "restored", term=1)
    files = {file.name: file.read_bytes() for file in (tmp_path / "restored/top_logprobs").iterdir()}
    assert files == {"0.bin": b"likeliest tokens", "1.bin": b"of the next group"}


def test_damage_on_shared_storage_is_named(tmp_path):
    store = DirectoryStore(tmp_path / "shared")
    with open_head(tmp_path / "run", store) as ledger:
        commit_step(ledger, 0, 0)
    (part,) = (tmp_path / "shared/parts").glob("*/*")
    data = part.read_bytes()
    part.write_bytes(data[:-1])
    with pytest.raises(StorageFailed, match=r"parts/../\w+ is damaged, and traces/000000.seg cannot be restored"):
        restore_run(store, tmp_path / "a", term=1)
    part.write_bytes(data)
    entry = tmp_path / "shared/ledger/0/0"
    entry.write_bytes(entry.read_bytes()[:-1])
    with pytest.raises(StorageFailed, match="ledger/0/0 is damaged"):
        restore_run(store, tmp_path / "b", term=1)


def test_run_that_was_local_before_is_in_its_first_entry(tmp_path, shared):
    with RunStore.open(tmp_path / "run") as store:
        ledger = Ledger.open(store)
        issue_and_score(ledger, 0)
        run_all(store.add_rollout(*make_rollout(7)))
    with open_head(tmp_path / "run", shared) as ledger:
        run_all(ledger.replicate())
        committed = dump(ledger.store)
    restore_run(shared, tmp_path / "restored", term=1)
    with RunStore.open(tmp_path / "restored") as store:
        assert dump(store) == committed
        assert len(read_replies(store)) == 3


def test_new_term_has_a_higher_trainer(tmp_path, shared):
    with open_head(tmp_path / "run", shared) as ledger:
        run_all(ledger.register_trainer())
        commit_step(ledger, 0, 0)
        old = ledger.progress().incarnation
        ledger.begin_term(2)
        progress = ledger.progress()
        assert (progress.incarnation, progress.registered, progress.acknowledged) == (2 << 16, 0, 1)
        issue_and_score(ledger, 1)
        record_batch(ledger, 1, 1)
        with pytest.raises(ProcessReplaced, match=r"trainer 0 may not act, because the newest is trainer 2\.0"):
            run_all(ledger.record_served(1, incarnation=old))


def test_rollout_that_is_stored_in_the_transaction_of_an_entry_is_complete_in_it(tmp_path, shared):
    """Its row was in the entry, but not the bytes of its trace, and the run could not be restored."""
    with open_head(tmp_path / "run", shared) as ledger:
        store, started, release = ledger.store, threading.Event(), threading.Event()
        run_all(ledger.replicate())
        store.submit_change(lambda _: (started.set(), release.wait(10)))
        assert started.wait(10)
        store.submit_change(lambda _: None, [make_rollout(1)])
        with ThreadPoolExecutor(1) as pool:
            entry = pool.submit(HeadReplicator(store, shared).replicate_blocking)
            deadline = time.monotonic() + 10
            while store._writer._queue.qsize() < 2 and time.monotonic() < deadline:  # both wait for one transaction
                time.sleep(0.001)
            release.set()
            entry.result(10)
        assert set(read_replies(store)) == {"r1"}
    restore_run(shared, tmp_path / "restored", term=1)
    with RunStore.open(tmp_path / "restored") as store:
        assert check_storage(store) == []
        assert set(read_replies(store)) == {"r1"}
