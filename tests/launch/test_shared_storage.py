"""Storage that hangs ends the start of a run with StorageFailed, and the end of a run goes on without it.

When it answers again, what was given up has no effect.
"""

import shutil
import threading
from functools import partial
from pathlib import Path

import pytest

from ramify.core.display import Display
from ramify.core.errors import StorageFailed
from ramify.launch import execution, head, published_weights, shared_storage
from ramify.launch.completion import mark_finished, prepare_run_directory
from ramify.launch.head import check_newest_head, prepare_head, read_local_state
from ramify.launch.head_leases import hold_leases
from ramify.launch.plan import build_plan
from ramify.launch.process import ProcessState
from ramify.launch.published_weights import (
    get_served_directory,
    hold_weights_directory,
    link_newest_weights,
    save_final_weights,
)
from ramify.launch.run_record import RunRecord
from ramify.launch.shared_directory import link_shared_directory, move_shared_aside
from ramify.launch.shared_storage import TimedDirectoryStore, call_storage_blocking
from ramify.launch.supervisor import ProcessStatus
from ramify.run.fencing import directory_store
from ramify.run.fencing.directory_store import DirectoryStore
from ramify.run.store import head_replication
from ramify.run.store.run_store import RunStore
from ramify.train import weights_directory
from tests.launch.test_head import make_config, train_step
from tests.launch.test_head_leases import make_specs
from tests.launch.test_shared_directory import publish

pytestmark = pytest.mark.timeout(60)

NO_ANSWER = r"the storage did not answer within 0.5 s; check the disk and the mounts"


class HangingStorage:
    """Makes functions block until `recover`, or the end of the test."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.has_recovered, self.blocked = monkeypatch, threading.Event(), []

    def __call__(self, owner, name, is_affected=lambda argument: True):
        """Make a function block, for calls whose first argument `is_affected`."""
        original = getattr(owner, name)

        def call(*args, **options):
            if is_affected(args[0]):
                self.blocked.append(threading.current_thread())
                self.has_recovered.wait()
            return original(*args, **options)

        self.monkeypatch.setattr(owner, name, call)
        self.monkeypatch.setattr(shared_storage, "STORAGE_TIMEOUT", 0.5)
        self.monkeypatch.setattr(shared_storage, "CLEANUP_TIMEOUT", 0.5)

    def recover(self):
        """Let the blocked calls go on, and return when their threads have ended."""
        self.has_recovered.set()
        for thread in self.blocked:
            thread.join(30)


@pytest.fixture
def hang(monkeypatch):
    """Return storage of which some call must block."""
    storage = HangingStorage(monkeypatch)
    try:
        yield storage
        assert storage.blocked
    finally:
        storage.has_recovered.set()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (head, "check_shared_parent"),
        (DirectoryStore, "read"),
        (DirectoryStore, "create"),
        (head, "link_shared_directory"),
        (RunStore, "open"),
        (head, "move_shared_aside"),
    ],
)
def test_new_head_ends_with_a_named_failure(tmp_path, hang, owner, name):
    config, is_fresh = make_config(tmp_path, "a"), name == "move_shared_aside"
    if is_fresh:
        train_step(config)
    hang(owner, name)
    with pytest.raises(StorageFailed, match=f"run.*: {NO_ANSWER}"):
        prepare_head(config, fresh=is_fresh)


def test_check_for_a_newer_head_ends_with_a_named_failure(tmp_path, hang):
    config = make_config(tmp_path, "a")
    train_step(config)
    hang(DirectoryStore, "read")
    with pytest.raises(StorageFailed, match=f"shared/run/epoch/0: {NO_ANSWER}"):
        check_newest_head(config.path)


def test_leases_are_recorded_within_a_deadline_and_left_if_they_cannot_be_removed(tmp_path, hang):
    config, lines = make_config(tmp_path, "a"), []
    train_step(config)
    leases = hold_leases(config.path, config.shared_path, 0, make_specs(tmp_path), print_line=lines.append)
    with leases:
        RunRecord(config.path, "").write([ProcessStatus("a", ProcessState.ENDED, 1, 0, 0.0, token="0.0")])
        hang(Path, "unlink", lambda path: path.parent.name == "leases")
    assert (config.shared_path / "leases" / "0").exists()
    (line,) = lines
    assert line.startswith(f"files were not removed: StorageFailed: {config.shared_path}/leases: the storage did not")
    hang(Path, "mkdir", lambda path: path.name == "leases")
    with (
        pytest.raises(StorageFailed, match=f"shared/run/leases: {NO_ANSWER}"),
        hold_leases(config.path, config.shared_path, 0, make_specs(tmp_path)),
    ):
        raise AssertionError("its leases are not recorded")


def test_served_weights_that_cannot_be_removed_do_not_stop_a_run_from_ending(tmp_path, hang):
    config, lines = make_config(tmp_path, "a"), []
    train_step(config)
    with hold_weights_directory(config, lines.append):
        hang(published_weights.shutil, "rmtree")
    (line,) = lines
    assert line.startswith(f"files were not removed: StorageFailed: {config.weights_directory}: the storage did not")


def test_served_weights_of_an_earlier_head_that_cannot_be_removed_do_not_stop_a_run_from_starting(tmp_path, hang):
    first, second, lines = make_config(tmp_path, "a"), make_config(tmp_path, "b"), []
    for config in (first, second):
        prepare_head(config, print_line=lambda line: None)
    hang(shutil, "rmtree", lambda path: get_served_directory(first).name in path.name)
    with hold_weights_directory(second, lines.append):
        (line,) = lines
    assert line.startswith(f"files were not removed: StorageFailed: {second.weights_directory}: the storage did not")


def test_final_weights_are_copied_within_a_deadline_and_not_later(tmp_path, hang, monkeypatch):
    monkeypatch.setattr(weights_directory, "SHM_ROOT", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    config = make_config(tmp_path, "a", weights={"transport": "shm"})
    publish(config.weights_directory, 1)
    hang(shutil, "copytree")
    with pytest.raises(StorageFailed, match=r"weights: the storage did not answer within 0.5.* s"):
        save_final_weights(config)
    hang.recover()
    assert list((config.shared_path / "weights").iterdir()) == []


def test_weights_of_an_engine_are_not_linked_later(tmp_path, hang):
    config = make_config(tmp_path, "a")
    newest = publish(config.weights_directory, 1)
    hang(shutil, "copytree")
    with pytest.raises(StorageFailed):
        call_storage_blocking(partial(link_newest_weights, config), newest)
    hang.recover()
    assert list(get_served_directory(config).iterdir()) == []


def test_served_weights_are_not_removed_later(tmp_path, hang):
    config = make_config(tmp_path, "a")
    with hold_weights_directory(config, lambda line: None):
        served = publish(get_served_directory(config), 1)
        hang(shutil, "rmtree")
    hang.recover()
    assert served.exists()


def test_leases_are_not_removed_later(tmp_path, hang):
    for name in ("a", "b"):
        train_step(config := make_config(tmp_path, name))
    leases = config.shared_path / "leases"
    with hold_leases(config.path, config.shared_path, 1, make_specs(tmp_path), print_line=lambda line: None):
        RunRecord(config.path, "").write([ProcessStatus("a", ProcessState.ENDED, 1, 0, 0.0, token="1.0")])
        hang(Path, "unlink", lambda path: path == leases / "0")
    hang.recover()
    assert (leases / "1").exists()


def test_entry_of_the_head_log_is_not_created_later(tmp_path, hang):
    hang(directory_store, "write_and_fsync")
    with pytest.raises(StorageFailed):
        TimedDirectoryStore(tmp_path).create("ledger/0/0", b"entry")
    hang.recover()
    assert list((tmp_path / "ledger/0").iterdir()) == []


def test_history_of_a_run_is_not_begun_later(tmp_path, hang):
    config = make_config(tmp_path, "a")
    hang(RunStore, "open")
    with pytest.raises(StorageFailed):
        prepare_head(config)
    hang.recover()
    assert read_local_state(config.path) is None


@pytest.mark.parametrize(
    ("change", "name", "is_affected"),
    [
        (link_shared_directory, "mkdir", lambda path: path.name == "checkpoints"),
        (move_shared_aside, "exists", lambda path: path.name == "weights.old-1"),
    ],
)
def test_shared_directory_is_not_changed_later(tmp_path, hang, change, name, is_affected):
    config = make_config(tmp_path, "a")
    newest = publish(config.weights_directory, 1)
    hang(Path, name, is_affected)
    with pytest.raises(StorageFailed):
        call_storage_blocking(partial(change, config.path, config.shared_path), config.path)
    hang.recover()
    assert newest.exists() and not (config.path / "checkpoints").is_symlink()


def test_end_of_a_run_is_replicated_within_a_deadline(tmp_path, hang, monkeypatch):
    config = make_config(tmp_path, "a")
    train_step(config)
    monkeypatch.setattr(head_replication, "STORAGE_TIMEOUT", 0.2)
    monkeypatch.setattr(head_replication, "BLOCKING_CHANGE_TIMEOUT", 1.0)
    hang(DirectoryStore, "create")
    with pytest.raises(StorageFailed, match=r"was not copied to shared storage within 0.2 s; check the shared dir"):
        mark_finished(config)


def test_end_that_was_not_replicated_is_replicated_by_a_rerun(tmp_path, monkeypatch):
    first, second = (make_config(tmp_path, name, max_steps=1) for name in ("a", "b"))
    train_step(first)
    with monkeypatch.context() as patch:
        patch.setattr(head_replication, "STORAGE_TIMEOUT", 0.0)
        patch.setattr(DirectoryStore, "create", raise_os_error)
        with pytest.raises(StorageFailed, match="check the shared directory, then rerun the command"):
            mark_finished(first)
    result = execution.execute_plan(build_plan(first, gpus=[]), display=Display())
    assert (result.did_run, result.steps) == (False, 1)
    prepare_head(second)
    assert prepare_run_directory(second) == 1


def raise_os_error(*_):
    raise OSError("the mount is gone")


def test_search_for_checkpoints_on_the_shared_storage_has_a_deadline(tmp_path, hang):
    config = make_config(tmp_path, "a")
    train_step(config)
    hang(execution, "prepare_run_directory")
    with pytest.raises(StorageFailed, match=f"shared/run: {NO_ANSWER}"):
        execution.execute_plan(build_plan(config, gpus=[]), display=Display())


def test_failure_is_recorded_within_a_deadline(tmp_path, hang, monkeypatch):
    config = make_config(tmp_path, "a")
    train_step(config)
    monkeypatch.setattr(execution, "CLEANUP_TIMEOUT", 0.2)
    hang(RunStore, "open")
    execution._record_end(config.path, "failed", message="the disk is gone")
