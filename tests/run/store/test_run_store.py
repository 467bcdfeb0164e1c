"""A run store keeps acknowledged rollouts, and is written by one process at a time."""

import asyncio
import errno
import os
import sqlite3
import subprocess
import sys
import threading

import pytest

from ramify.core.errors import ConfigInvalid, DataCorrupt, OperationInvalid, RunBusy, StorageFailed, StorageFull
from ramify.run.lookup import default_run_name
from ramify.run.store import RolloutRecord, RunStore, locks, open_run, run_store, segment_log
from ramify.run.store.locks import find_writer, write_holder
from ramify.run.store.run_store import LOCK_NAME
from tests.support.traces import make_rollout, read_replies


async def add(store: RunStore, *numbers: int, **options) -> None:
    await asyncio.gather(*(store.add_rollout(*make_rollout(number, **options)) for number in numbers))


async def test_rollouts_are_there_when_the_run_is_opened_again(tmp_path):
    with RunStore.open(tmp_path) as store:
        await add(store, 0, 1, 2)
    with RunStore.open(tmp_path, write=False) as store:
        assert [(row.task, row.repetition) for row in store.rollouts()] == [("task-0", 0), ("task-0", 1), ("task-1", 0)]
        assert store.rollouts(task="task-1") == [make_rollout(2)[0]]
        (trace,) = store.read_traces("r1")
        assert trace.last_reply == "reply 1"
        assert trace.nodes[1].logprobs.tolist() == [-0.5, -0.25]
        assert trace.reward == 0.5


async def test_a_rollout_with_the_same_id_replaces_the_first(tmp_path):
    with RunStore.open(tmp_path) as store:
        await add(store, 0, text="first", failure="ProviderError", reward=None)
        await add(store, 0, text="second")
        assert read_replies(store) == {"r0": "second"}
        assert store.rollouts()[0].failure is None


async def test_concurrent_rollouts_share_a_commit(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd))[1])
    with RunStore.open(tmp_path) as store:
        before = len(synced)
        await add(store, *range(60))
        assert len(store.rollouts()) == 60
        assert len(synced) - before < 30


async def test_a_full_segment_is_followed_by_a_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_log, "MAX_SEGMENT_BYTES", 2000)
    with RunStore.open(tmp_path) as store:
        await add(store, *range(20))
        await add(store, *range(20, 25))
    files = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert len(files) > 3
    assert all((tmp_path / "traces" / name).stat().st_size <= 2000 for name in files)
    with RunStore.open(tmp_path) as store:
        await add(store, 25)
        assert read_replies(store) == {f"r{number}": f"reply {number}" for number in range(26)}


async def test_a_rollout_that_cannot_be_encoded_fails_alone(tmp_path):
    record, (trace,) = make_rollout(0)
    trace.info["notes"] = []
    trace.info["notes"].append(object())
    with RunStore.open(tmp_path) as store:
        with pytest.raises(OperationInvalid, match=r"info\.notes\[0\].*object"):
            await store.add_rollout(record, [trace])
        await add(store, 1)
        assert read_replies(store) == {"r1": "reply 1"}


async def test_a_record_that_violates_a_constraint_fails_alone(tmp_path):
    _, traces = make_rollout(0)
    bad = RolloutRecord(None, "task", summary={})  # type: ignore[arg-type]

    with RunStore.open(tmp_path) as store:
        error, result = await asyncio.gather(
            store.add_rollout(bad, traces), store.add_rollout(*make_rollout(1)), return_exceptions=True
        )
        assert "NOT NULL" in str(error)
        assert result is None
        assert read_replies(store) == {"r1": "reply 1"}


async def test_a_writer_thread_that_cannot_start_fails_all_changes(tmp_path, monkeypatch):
    connect, times = run_store._connect, iter(range(9))

    def fail_after_first(path):
        if next(times):
            raise sqlite3.OperationalError("unable to open database file")
        return connect(path)

    monkeypatch.setattr(run_store, "_connect", fail_after_first)
    with RunStore.open(tmp_path) as store:
        for number in range(2):  # queued before the thread failed, and after
            with pytest.raises(StorageFailed, match="unable to open"):
                await asyncio.wait_for(store.add_rollout(*make_rollout(number)), 10)


async def test_a_full_disk_is_reported_even_if_its_free_space_is_unknown(tmp_path, monkeypatch):
    def raise_io_error(*_):
        raise OSError(errno.EIO, "Input/output error")

    def raise_no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunStore.open(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", raise_io_error)
            patch.setattr(segment_log.SegmentLog, "append", raise_no_space)
            with pytest.raises(StorageFull, match="free space unknown"):
                await asyncio.wait_for(store.add_rollout(*make_rollout(0)), 10)
        await add(store, 1)
        assert read_replies(store) == {"r1": "reply 1"}


HOLD = "import sys, pathlib; from ramify.run.store import RunStore; s = RunStore.open(pathlib.Path(sys.argv[1])); " + (
    "print('open', flush=True); sys.stdin.read()"
)


@pytest.mark.process
def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=-1, stdout=-1, text=True)
    try:
        assert holder.stdout.readline() == "open\n"
        for write in (True, False):
            with pytest.raises(RunBusy, match=f"process {holder.pid}"):
                RunStore.open(tmp_path, write=write)
    finally:
        holder.kill()
        holder.communicate(timeout=30)
    RunStore.open(tmp_path).close()


async def test_readers_share_a_run(tmp_path):
    with RunStore.open(tmp_path) as store:
        await add(store, 0)
    with RunStore.open(tmp_path, write=False) as one, RunStore.open(tmp_path, write=False) as two:
        assert read_replies(one) == read_replies(two) == {"r0": "reply 0"}
        with pytest.raises(ConfigInvalid, match="read-only"):
            await add(one, 1)


def test_opening_a_missing_run_for_reading_creates_nothing(tmp_path):
    with pytest.raises(ConfigInvalid, match="is not a run"):
        RunStore.open(tmp_path / "nothing", write=False)
    assert not (tmp_path / "nothing").exists()


async def test_a_changed_byte_raises_trace_corrupt(tmp_path):
    with RunStore.open(tmp_path) as store:
        await add(store, 0)
    path = tmp_path / "traces" / "000000.seg"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(bytes(data))
    with RunStore.open(tmp_path) as store, pytest.raises(DataCorrupt, match=r"000000\.seg"):
        store.read_traces("r0")


async def test_a_segment_shorter_than_committed_is_refused(tmp_path):
    with RunStore.open(tmp_path) as store:
        await add(store, 0)
    os.truncate(tmp_path / "traces" / "000000.seg", 10)
    with pytest.raises(DataCorrupt, match="has 10 bytes"):
        RunStore.open(tmp_path)


# -- identity ----------------------------------------------------------------------------------------------------------

IDENTITY = {"taskset": {"id": "a"}, "model": "tiny", "sampling": {"temperature": 1.0}, "harness": {"id": "chat"}}


def test_another_identity_is_refused_with_the_differences(tmp_path):
    open_run(tmp_path / "run", IDENTITY).close()
    other = {**IDENTITY, "sampling": {"temperature": 0.5}, "taskset": {"id": "a", "max_chars": 3}}
    with pytest.raises(ConfigInvalid) as refused:
        open_run(tmp_path / "run", other)
    assert "sampling.temperature: was 1.0, now 0.5" in refused.value.message
    assert "taskset.max_chars: was not set, now 3" in refused.value.message
    assert "--fresh" in refused.value.message
    open_run(tmp_path / "run", IDENTITY).close()


async def test_a_writer_waits_for_readers_until_its_timeout(tmp_path):
    open_run(tmp_path, {}).close()
    reader = RunStore.open(tmp_path, write=False)
    with pytest.raises(RunBusy):
        open_run(tmp_path, {})
    done = threading.Timer(0.3, reader.close)
    done.start()
    with open_run(tmp_path, {}, lock_timeout=20.0) as store:
        await add(store, 1)
    done.join()


def test_a_run_is_released_if_its_identity_cannot_be_stored(tmp_path, monkeypatch):
    def raise_full(*_):
        raise StorageFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "set_fact", raise_full)
        with pytest.raises(StorageFull):
            open_run(tmp_path, {"model": "tiny"})
    open_run(tmp_path, {"model": "tiny"}).close()


async def test_fresh_moves_the_old_run_aside(tmp_path):
    for _ in range(3):
        with open_run(tmp_path / "run", IDENTITY, fresh=True) as store:
            assert store.rollouts() == []
            await add(store, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1", "run.old-2"]
    with RunStore.open(tmp_path / "run.old-1", write=False) as store:
        assert read_replies(store) == {"r0": "reply 0"}


def test_fresh_does_not_move_a_run_in_use(tmp_path):
    with open_run(tmp_path / "run", IDENTITY), pytest.raises(RunBusy):
        open_run(tmp_path / "run", IDENTITY, fresh=True)


def test_the_default_name_is_readable_and_depends_on_the_identity():
    name = default_run_name("pkg.envs:Reverse", "/models/Qwen3-0.6B/", IDENTITY)
    assert name.startswith("Reverse-Qwen3-0.6B-")
    assert name == default_run_name("pkg.envs:Reverse", "/models/Qwen3-0.6B/", dict(reversed(IDENTITY.items())))
    assert name != default_run_name("pkg.envs:Reverse", "/models/Qwen3-0.6B/", {**IDENTITY, "model": "other"})
    assert default_run_name("my_env.py", "tiny", {}).startswith("my_env-tiny-")


@pytest.mark.parametrize("write", [True, False])
def test_a_path_that_is_too_long_raises_storage_failed(tmp_path, write):
    with pytest.raises(StorageFailed, match="too long"):
        RunStore.open(tmp_path / ("x" * 300), write=write)


async def test_a_reader_without_the_lock_sees_the_last_commit_of_a_run_that_is_written(tmp_path):
    with RunStore.open(tmp_path) as writer:
        assert find_writer(tmp_path / LOCK_NAME) == os.getpid()
        await writer.add_rollout(*make_rollout(0))
        with RunStore.open(tmp_path, write=False, lock=False) as reader:
            assert list(read_replies(reader)) == ["r0"]
            await writer.add_rollout(*make_rollout(1))
            assert list(read_replies(reader)) == ["r0"]  # all that is read together is of one commit
            with pytest.raises(ConfigInvalid, match="read-only"):
                reader.set_fact("a", 1)
        with RunStore.open(tmp_path, write=False, lock=False) as reader:
            assert list(read_replies(reader)) == ["r0", "r1"]
    assert find_writer(tmp_path / LOCK_NAME) is None
    with RunStore.open(tmp_path, write=False, lock=False), RunStore.open(tmp_path):
        pass  # a reader without the lock keeps nobody from writing


@pytest.mark.parametrize(
    ("kind", "get_pid", "get_expected"),
    [
        pytest.param("WRITE", os.getpid, os.getpid, id="writer"),
        pytest.param("READ", os.getpid, lambda: None, id="reader"),
        pytest.param("WRITE", lambda: 1, lambda: None, id="the same inode on another device"),
        pytest.param("WRITE", lambda: 0, lambda: 0, id="in another container"),
    ],
)
def test_the_writer_is_the_holder_that_the_lock_file_names(tmp_path, monkeypatch, kind, get_pid, get_expected):
    pid, expected = get_pid(), get_expected()
    path, kernel_list = tmp_path / LOCK_NAME, tmp_path / "locks"
    monkeypatch.setattr(locks, "PROC_LOCKS", kernel_list)
    with path.open("w") as file:
        write_holder(file.fileno())
        kernel_list.write_text(f"1: FLOCK  ADVISORY  {kind} {pid} 08:01:{path.stat().st_ino} 0 EOF\n")
        assert find_writer(path) == expected
        kernel_list.write_text(f"1: FLOCK  ADVISORY  {kind} {pid} 08:01:99999999 0 EOF\n")
        assert find_writer(path) is None
