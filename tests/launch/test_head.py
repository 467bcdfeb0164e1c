"""A run continues on its own head, or on another one from the history on shared storage; an old head is refused."""

import shutil
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from ramify.cli.rollback import run as roll_back
from ramify.core.display import Display
from ramify.core.errors import ConfigInvalid, ProcessReplaced
from ramify.launch.execution import execute_plan
from ramify.launch.head import check_newest_head, prepare_head, read_local_state
from ramify.launch.run_directory import FINISHED_KEY, mark_finished, prepare_run_directory
from ramify.orchestrate.batches import get_top_logprobs_path
from ramify.orchestrate.run_config import RunConfig
from ramify.run.fencing.head_log import DirectoryStore
from ramify.run.store import RunStore, open_run
from ramify.run.store.head_replication import HeadReplicator
from ramify.run.store.ledger import Ledger
from tests.support.heads import TRAIN, make_config, start
from tests.support.ledgers import commit_step, issue_and_score, run_all
from tests.support.plans import plan_here


def train_step(config: RunConfig, **options) -> None:
    """Start a head, commit one step, and stop."""
    ledger = start(config, **options)
    step = ledger.progress().committed
    commit_step(ledger, step, ledger.num_issued())
    ledger.store.close()


def test_head_continues_on_its_own_disk(tmp_path):
    config = make_config(tmp_path, "a")
    for _ in range(3):
        train_step(config)
    state = read_local_state(config.path)
    assert (state.term, state.next_entry) == (0, 4)  # one at the start of the run
    assert sorted(path.name for path in (tmp_path / "shared/run/term").iterdir()) == ["0"]
    assert (config.path / "checkpoints").readlink() == tmp_path / "shared/run/checkpoints"


@pytest.mark.promise
def test_other_head_continues_from_shared_storage_and_the_old_one_is_refused(tmp_path):
    first, second = make_config(tmp_path, "a"), make_config(tmp_path, "b")
    train_step(first)
    old = start(first)
    new = start(second)
    assert new.lines == ["this head begins term 1 of the run, after step 1"]
    assert (new.progress().committed, new.progress().incarnation) == (1, 1 << 16)
    with pytest.raises(ProcessReplaced, match="term 0 was ended at entry"):
        commit_step(old, 1, 1)
    commit_step(new, 1, 1)
    old.store.close()
    new.store.close()
    with RunStore.open(first.path) as store, pytest.raises(ProcessReplaced):  # a restarted process of the old head
        run_all(HeadReplicator(store, DirectoryStore(first.shared_path)).replicate())


@pytest.mark.promise
def test_command_on_an_old_head_takes_the_run_back(tmp_path):
    first, second = make_config(tmp_path, "a"), make_config(tmp_path, "b")
    train_step(first)
    train_step(second)
    train_step(first)
    state = read_local_state(first.path)
    assert state.term == 2
    with RunStore.open(first.path, write=False) as store:
        assert [commit.incarnation >> 16 for commit in Ledger.open_readonly(store).commits()] == [0, 1, 2]
    assert not (tmp_path / "a/run.old-1/checkpoints").is_symlink()  # it must not touch the files of the new run


@pytest.mark.promise
def test_only_the_newest_head_can_be_rolled_back(tmp_path):
    """A rollback renames checkpoints, and those in the shared directory belong to the newest head."""
    first, second = make_config(tmp_path, "a"), make_config(tmp_path, "b")
    train_step(first)
    check_newest_head(first.path)
    train_step(second)
    check_newest_head(second.path)
    with pytest.raises(ProcessReplaced, match=r"a/run belongs to an earlier head"):
        roll_back(Namespace(run=str(first.path), step=1))


def test_start_waits_for_processes_that_are_ending(tmp_path):
    config = make_config(tmp_path, "a")
    train_step(config)
    old = start(config)

    def end() -> None:
        commit_step(old, 1, 1)
        old.store.close()

    thread = threading.Thread(target=end)
    thread.start()
    train_step(config)
    thread.join()
    assert read_local_state(config.path).term == 0


@pytest.mark.parametrize("interruption", ["term", "restoring"])
def test_takeover_that_was_interrupted_is_repeated(tmp_path, monkeypatch, interruption):
    train_step(make_config(tmp_path, "a"))
    config = make_config(tmp_path, "b")
    target = {"term": "ramify.launch.head.restore_run", "restoring": "ramify.launch.head.fsync_path"}[interruption]
    with monkeypatch.context() as patch:
        patch.setattr(target, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        if interruption == "restoring":
            patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_head(config)
    train_step(config)
    assert read_local_state(config.path).term == 2


def test_head_that_was_lost_before_its_first_entry(tmp_path):
    prepare_head(make_config(tmp_path, "a"))
    train_step(make_config(tmp_path, "b"))
    assert read_local_state(make_config(tmp_path, "b").path).term == 1


def test_fresh_run_begins_again_and_ends_the_old_one(tmp_path):
    config = make_config(tmp_path, "a")
    old = start(config)
    (config.path / "checkpoints/step_000001-0").mkdir()
    old.store.close()
    new = start(config, fresh=True)
    assert (new.progress().committed, new.progress().incarnation) == (0, 1 << 16)
    commit_step(new, 0, 0)
    new.store.close()
    assert (tmp_path / "a/run.old-1/checkpoints/step_000001-0").is_dir()
    assert list((config.path / "checkpoints").iterdir()) == []
    shutil.rmtree(tmp_path / "a")
    ledger = start(make_config(tmp_path, "b"))
    assert ledger.progress().committed == 1
    ledger.store.close()


@pytest.mark.parametrize("moment", ["move_shared_aside", "_begin_history"])
def test_fresh_start_that_was_interrupted_is_completed_by_the_next_start(tmp_path, monkeypatch, moment):
    config = make_config(tmp_path, "a")
    train_step(config)
    (config.path / "checkpoints/step_000001-0").mkdir()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"ramify.launch.head.{moment}", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        prepare_head(config, fresh=True)
    ledger = start(config)
    assert ledger.progress().committed == 0
    ledger.store.close()
    assert (tmp_path / "a/run.old-1/checkpoints/step_000001-0").is_dir()
    assert list((config.path / "checkpoints").iterdir()) == []


def test_another_run_of_the_same_name_is_refused_before_the_old_head_is_ended(tmp_path):
    train_step(make_config(tmp_path, "a"))
    other = make_config(tmp_path, "b", model={"name": "tiny-vl"})
    with pytest.raises(ConfigInvalid, match=r"shared/run holds a run with another identity"):
        prepare_head(other)
    train_step(make_config(tmp_path, "a"))
    assert read_local_state(tmp_path / "a/run").term == 0


def test_finished_run_is_finished_on_every_head(tmp_path):
    first, second = (make_config(tmp_path, head, max_steps=1) for head in ("a", "b"))
    train_step(first)
    mark_finished(first)
    prepare_head(second)
    assert prepare_run_directory(second) == 1


def test_last_entry_of_a_finished_run_has_the_files_of_its_groups(tmp_path):
    first, second = (make_config(tmp_path, head, max_steps=1) for head in ("a", "b"))
    train_step(first)
    file = get_top_logprobs_path(first.path, 1)
    with RunStore.open(first.path) as store:
        issue_and_score(Ledger.open(store), 1)  # changed after the last commit
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"likeliest tokens")
    mark_finished(first)
    prepare_head(second)
    assert get_top_logprobs_path(second.path, 1).read_bytes() == b"likeliest tokens"


def test_run_with_a_shared_directory_is_not_continued_without_it(tmp_path):
    train_step(make_config(tmp_path, "a"))
    local = RunConfig(name="run", output=tmp_path / "a", train=[TRAIN])
    with pytest.raises(ConfigInvalid, match=r"cluster\.shared_directory: .*a/run is a run with a shared directory"):
        prepare_run_directory(local)


def test_local_run_can_get_a_shared_directory(tmp_path):
    config = make_config(tmp_path, "a")
    local = RunConfig(name="run", output=tmp_path / "a", train=[TRAIN])
    with open_run(local.path, local.identity) as store:
        commit_step(Ledger.open(store), 0, 0)
    (local.path / "checkpoints/step_000001-0").mkdir(parents=True)
    with pytest.raises(ConfigInvalid, match=r"move its contents to .*shared/run/checkpoints"):
        prepare_head(config)
    (tmp_path / "shared/run/checkpoints").rmdir()
    (local.path / "checkpoints").rename(tmp_path / "shared/run/checkpoints")
    train_step(config)
    shutil.rmtree(config.path)
    ledger = start(make_config(tmp_path, "b"))
    assert ledger.progress().committed == 2
    ledger.store.close()


def test_end_that_was_not_replicated_is_replicated_by_a_rerun(tmp_path):
    first, second = (make_config(tmp_path, name, max_steps=1) for name in ("a", "b"))
    train_step(first)
    with open_run(first.path, first.identity) as store:  # as if the shared storage had failed afterwards
        store.set_fact(FINISHED_KEY, 1)
    result = execute_plan(plan_here(first), display=Display())
    assert (result.did_run, result.steps) == (False, 1)
    prepare_head(second)
    assert prepare_run_directory(second) == 1
