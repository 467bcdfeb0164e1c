"""Storage that hangs ends the start of a run with StorageFailed, and the end of a run goes on without it."""

import threading
from pathlib import Path

import pytest

from ramify.display import Display
from ramify.errors import StorageFailed
from ramify.fencing.directory_store import DirectoryStore
from ramify.launch import execution, head, published_weights, shared_storage
from ramify.launch.completion import get_finished_steps, mark_finished
from ramify.launch.head import check_newest_head, prepare_head
from ramify.launch.head_leases import hold_leases
from ramify.launch.plan import build_plan
from ramify.launch.process import ProcessState
from ramify.launch.published_weights import hold_weights_directory, save_final_weights
from ramify.launch.run_record import RunRecord
from ramify.launch.supervisor import ProcessStatus
from ramify.store import head_replication
from ramify.store.run_store import RunStore
from tests.launch.test_head import make_config, train_step
from tests.launch.test_head_leases import make_specs

NO_ANSWER = r"the storage did not answer within 1 s; check the disk and the mounts"


@pytest.fixture
def hang(monkeypatch):
    """Return a function that makes a function block until the test ends, for calls whose first argument `is_affected`.

    Some call must block.
    """
    has_ended, blocked = threading.Event(), threading.Event()

    def replace(owner, name, is_affected=lambda argument: True):
        original = getattr(owner, name)

        def call(*args, **options):
            if is_affected(args[0]):
                blocked.set()
                has_ended.wait()
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)
        monkeypatch.setattr(shared_storage, "STORAGE_TIMEOUT", 1.0)
        monkeypatch.setattr(shared_storage, "CLEANUP_TIMEOUT", 1.0)

    try:
        yield replace
        assert blocked.is_set()
    finally:
        has_ended.set()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (head, "check_shared_parent"),
        (DirectoryStore, "read"),
        (DirectoryStore, "create"),
        (head, "link_shared_directory"),
        (RunStore, "open"),
    ],
)
def test_new_head_ends_with_a_named_failure(tmp_path, hang, owner, name):
    hang(owner, name)
    with pytest.raises(StorageFailed, match=f"run.*: {NO_ANSWER}"):
        prepare_head(make_config(tmp_path, "a"))


def test_fresh_head_ends_with_a_named_failure(tmp_path, hang):
    config = make_config(tmp_path, "a")
    train_step(config)
    hang(head, "move_shared_aside")
    with pytest.raises(StorageFailed, match=f"shared/run: {NO_ANSWER}"):
        prepare_head(config, fresh=True)


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


def test_final_weights_are_saved_within_a_deadline(tmp_path, hang):
    hang(published_weights, "find_newest_weights")
    with pytest.raises(StorageFailed, match=f"weights: {NO_ANSWER}"):
        save_final_weights(make_config(tmp_path, "a"))


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
    assert get_finished_steps(second) == 1


def raise_os_error(*_):
    raise OSError("the mount is gone")


def test_search_for_checkpoints_on_the_shared_storage_has_a_deadline(tmp_path, hang):
    config = make_config(tmp_path, "a")
    train_step(config)
    hang(execution, "get_finished_steps")
    with pytest.raises(StorageFailed, match=f"shared/run: {NO_ANSWER}"):
        execution.execute_plan(build_plan(config, gpus=[]), display=Display())


def test_failure_is_recorded_within_a_deadline(tmp_path, hang, monkeypatch):
    config = make_config(tmp_path, "a")
    train_step(config)
    monkeypatch.setattr(execution, "CLEANUP_TIMEOUT", 0.2)
    hang(RunStore, "open")
    execution._record_failure(config.path, StorageFailed("the disk is gone"))
