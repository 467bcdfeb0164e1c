"""Every issued group is trained in exactly one step or dropped with a reason, and the audit checks it."""

import math
import shutil
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ramify.core.errors import ConfigInvalid, OperationInvalid, ProcessReplaced
from ramify.run.store import RunStore
from ramify.run.store.audit import audit
from ramify.run.store.group_state import TRANSITIONS, DropReason, GroupState, check_transition
from ramify.run.store.ledger import BatchRecord, GroupRecord, Ledger, LedgerProgress
from ramify.run.store.run_log import RunLog
from tests.support.ledgers import (
    commit,
    issue,
    issue_and_score,
    make_commit,
    record_batch,
    run_all,
    sample,
    states,
    train,
    train_groups,
)
from tests.support.traces import make_rollout

TMPFS = "/dev/shm" if Path("/dev/shm").is_dir() else None  # syncs are free there


@pytest.fixture
def store():
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder, RunStore.open(Path(folder)) as store:
        yield store


@pytest.fixture
def ledger(store):
    return Ledger.open(store)


def replace_trainer(ledger):
    """Register a trainer that replaces another one."""
    run_all(ledger.register_trainer())
    if not ledger.progress().incarnation:
        run_all(ledger.register_trainer())


@pytest.mark.parametrize("current", GroupState)
@pytest.mark.parametrize("target", GroupState)
def test_only_transitions_in_the_table_are_allowed(current, target):
    if target in TRANSITIONS[current]:
        check_transition("group 0", current, target)
    else:
        with pytest.raises(OperationInvalid, match=f"group 0 is {current.value} and cannot become {target.value}"):
            check_transition("group 0", current, target)


def test_a_group_passes_through_all_states_until_its_step_is_committed(ledger):
    issue(ledger, 0, incarnation=1, version=3)
    assert states(ledger) == ["issued"]
    sample(ledger, 0, 0)
    assert states(ledger) == ["issued"]
    sample(ledger, 0, 1)
    assert states(ledger) == ["sampled"]
    run_all(ledger.record_scored(0, {1: {"advantage": -0.5}}))
    record_batch(ledger, 0, 0)
    train(ledger, 0)
    assert states(ledger) == ["batched"]
    assert ledger.progress() == LedgerProgress(committed=0, acknowledged=1)
    commit(ledger, 1)
    assert ledger.progress() == LedgerProgress(committed=1, acknowledged=1)
    assert ledger.get_group(0) == GroupRecord(0, "reverse", 0, 2, 0, 1, 3, GroupState.TRAINED, 0)
    assert [attempt.state for attempt in ledger.attempts(0)] == [GroupState.TRAINED] * 2
    assert ledger.attempts(0)[1].notes == {"advantage": -0.5}
    assert ledger.store.read_traces(ledger.attempts(0)[1].rollout_id)[0].last_reply == "reply 1"
    assert audit(ledger) == []


def test_dropping_the_last_running_attempt_completes_its_group(ledger):
    issue(ledger, 0)
    run_all(
        ledger.retry_attempt(0, 0, "ProviderError"), ledger.drop_attempt(0, 0, DropReason.FAILED, "ProviderError: gone")
    )
    sample(ledger, 0, 1)
    assert states(ledger) == ["sampled"]
    dropped = ledger.attempts(0)[0]
    assert (dropped.num_tries, dropped.state) == (2, GroupState.DROPPED)
    assert (dropped.reason, dropped.detail) == (DropReason.FAILED, "ProviderError: gone")
    run_all(ledger.record_scored(0))
    record_batch(ledger, 0, 0)
    train(ledger, 0)
    commit(ledger, 1)
    assert [attempt.state for attempt in ledger.attempts(0)] == [GroupState.DROPPED, GroupState.TRAINED]
    assert audit(ledger) == []


def test_states_are_saved_in_the_transaction_that_issues_the_group(ledger, store):
    run_all(
        ledger.issue_groups([GroupRecord(0, "reverse", 7, 1)], {"source/reverse/at": [0, 1]}),
        ledger.save_states({"mix/reverse": 1}),
    )
    assert ledger.load_states("source/reverse/") == {"at": [0, 1]}
    assert ledger.load_states("mix/") == {"reverse": 1}
    with pytest.raises(OperationInvalid):
        run_all(ledger.issue_groups([GroupRecord(5, "reverse", 8, 1)], {"source/reverse/at": [0, 2]}))
    assert ledger.load_states("source/reverse/") == {"at": [0, 1]}


ILLEGAL_CHANGES = {
    "group 1 cannot be issued: the next group is 2": lambda ledger: ledger.issue_groups(
        [GroupRecord(1, "reverse", 1, 1)]
    ),
    "group 9 was never issued": lambda ledger: ledger.record_scored(9),
    "group 0 is issued and cannot become scored": lambda ledger: ledger.record_scored(0),
    "group 1 is batched and cannot become dropped": lambda ledger: ledger.drop_group(1, DropReason.CANCELLED),
    "attempt 7 of group 0 was never issued": lambda ledger: ledger.retry_attempt(0, 7, "ProviderError"),
    "attempt 0 of group 1 is batched and cannot be retried": lambda ledger: ledger.retry_attempt(1, 0, "ProviderError"),
    "attempt 0 of group 1 is batched and cannot become sampled": lambda ledger: ledger.record_sampled(
        1, 0, *make_rollout(3)
    ),
    "batch 3 cannot be recorded: the next batch is 1": lambda ledger: ledger.record_batch(
        BatchRecord(3, (0,), b"", {})
    ),
    "group 1 is batched and cannot become batched": lambda ledger: ledger.record_batch(BatchRecord(1, (1,), b"", {})),
    "batch 1 cannot be served: it was never recorded": lambda ledger: ledger.record_served(1, incarnation=0),
    "step 0 cannot be acknowledged: its batch was not served to this trainer": lambda ledger: ledger.acknowledge_step(
        0, incarnation=0
    ),
    "version 1 cannot be committed: expected 0 to 0": lambda ledger: ledger.commit_version(make_commit(ledger, 1)),
}


def test_illegal_transitions_are_refused_and_change_nothing(ledger):
    issue(ledger, 0)
    issue_and_score(ledger, 1)
    record_batch(ledger, 0, 1)
    before = ledger.groups(), ledger.attempts(), ledger.batches(), ledger.progress()
    for problem, change in ILLEGAL_CHANGES.items():
        with pytest.raises(OperationInvalid, match=problem):
            run_all(change(ledger))
        assert (ledger.groups(), ledger.attempts(), ledger.batches(), ledger.progress()) == before


@pytest.mark.promise
def test_a_new_trainer_is_served_the_uncommitted_batches_again(ledger):
    for step in range(3):
        issue_and_score(ledger, 2 * step)
        issue_and_score(ledger, 2 * step + 1)
        record_batch(ledger, step, 2 * step + 1, 2 * step)
        train(ledger, step)
    commit(ledger, 1)
    replace_trainer(ledger)
    assert ledger.progress() == LedgerProgress(committed=1, acknowledged=1, incarnation=1, registered=1)
    assert [(batch.step, batch.group_numbers) for batch in ledger.batches(1)] == [(1, (3, 2)), (2, (5, 4))]
    with pytest.raises(OperationInvalid, match="already committed"):
        run_all(ledger.record_served(0, incarnation=1))
    train(ledger, 1)
    train(ledger, 2)
    commit(ledger, 3)
    assert [(incarnation, step) for incarnation, step, _ in ledger.served_batches()] == [
        (0, 0),
        (0, 1),
        (1, 1),
        (0, 2),
        (1, 2),
    ]
    assert audit(ledger) == []


def test_a_step_belongs_to_the_trainer_that_committed_it_or_else_was_served_last(ledger):
    for step in range(3):
        issue_and_score(ledger, step)
        record_batch(ledger, step, step)
    assert ledger.get_step_trainer(0) is None
    train(ledger, 0)
    train(ledger, 1)
    commit(ledger, 1)
    assert (ledger.get_step_trainer(0), ledger.get_step_trainer(1)) == (0, 0)
    replace_trainer(ledger)
    assert ledger.get_step_trainer(1) == 0
    train(ledger, 1)
    assert (ledger.get_step_trainer(0), ledger.get_step_trainer(1)) == (0, 1)
    train(ledger, 2)
    commit(ledger, 3)
    replace_trainer(ledger)
    assert [ledger.get_step_trainer(step) for step in range(4)] == [0, 1, 1, None]


@pytest.mark.promise
def test_replaced_trainer_changes_nothing(ledger):
    issue_and_score(ledger, 0)
    record_batch(ledger, 0, 0)
    train(ledger, 0)
    record = make_commit(ledger, 1)
    replace_trainer(ledger)
    before = ledger.groups(), ledger.served_batches(), ledger.progress(), ledger.commits()
    for change in (
        lambda: ledger.record_served(0, incarnation=0),
        lambda: ledger.acknowledge_step(0, incarnation=0),
        lambda: ledger.commit_version(record),
    ):
        with pytest.raises(ProcessReplaced, match="trainer 0 may not act, because the newest is trainer 1"):
            run_all(change())
    assert (ledger.groups(), ledger.served_batches(), ledger.progress(), ledger.commits()) == before


def test_commit_names_its_checkpoint_once(ledger):
    train_groups(ledger, range(2))
    record = make_commit(ledger, 2)
    run_all(ledger.commit_version(record))
    run_all(ledger.commit_version(record))  # the reply to the first request was lost
    assert ledger.commits() == [record] == [ledger.get_commit(2)]
    with pytest.raises(OperationInvalid, match="committed by trainer 0 with checkpoint step_000002-0"):
        run_all(ledger.commit_version(replace(record, directory="step_000002-7")))
    assert audit(ledger) == []


@pytest.mark.promise
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE commits SET incarnation = 5", "version 1 was committed by trainer 5, which never received the batch"),
        ("DELETE FROM commits", "the history ends at version 2, but the last commit is version 0"),
        (
            "UPDATE commits SET incarnation = 1 WHERE version = 1",
            "version 2 was committed by trainer 0 after trainer 1 had committed version 1",
        ),
    ],
)
def test_audit_finds_commits_of_two_copies(ledger, change, problem):
    for step in range(2):
        issue_and_score(ledger, step)
        record_batch(ledger, step, step)
        train(ledger, step)
        commit(ledger, step + 1)
    assert audit(ledger) == []
    ledger.store.submit_change(lambda connection: connection.execute(change)).result(10)
    assert any(problem in line for line in audit(ledger))


@pytest.mark.promise
def test_rollback_serves_the_same_batches_and_counts_each_group_once(ledger):
    train_groups(ledger, range(3))
    commit(ledger, 3)
    with pytest.raises(OperationInvalid, match="cannot end at version 4: expected 0 to 3"):
        run_all(ledger.roll_back(4, "step_000004"))
    run_all(ledger.roll_back(1, "step_000001"))
    assert ledger.progress() == LedgerProgress(committed=1, acknowledged=1, incarnation=1)
    assert states(ledger) == ["trained", "batched", "batched"]
    assert [attempt.state for attempt in ledger.attempts(2)] == [GroupState.BATCHED] * 2
    assert audit(ledger, finished=False) == []
    assert [batch.step for batch in ledger.batches(1)] == [1, 2]
    for step in (1, 2):
        train(ledger, step)
    commit(ledger, 3)
    assert states(ledger) == ["trained"] * 3
    assert audit(ledger) == []


def test_a_resumed_run_finds_its_unfinished_attempts(tmp_path):
    with RunStore.open(tmp_path) as store:
        ledger = Ledger.open(store)
        issue_and_score(ledger, 0)
        issue(ledger, 1, size=3)
        sample(ledger, 1, 1)
        issue(ledger, 2)
        run_all(ledger.drop_group(2, DropReason.CANCELLED))
    with RunStore.open(tmp_path) as store:
        ledger = Ledger.open(store)
        assert [(group.number, group.state.value) for group in ledger.open_groups()] == [(0, "scored"), (1, "issued")]
        assert [a.attempt_index for a in ledger.attempts(1) if a.state is GroupState.ISSUED] == [0, 2]


def test_drop_reasons_are_ordered_by_number_of_groups(ledger):
    assert ledger.describe_drops() == ""
    details = ["zero_advantage", "gibberish", "zero_advantage"]
    for number, detail in enumerate(details):
        issue(ledger, number)
        run_all(ledger.drop_group(number, DropReason.FILTERED, detail))
    assert ledger.describe_drops() == "2 × filtered: zero_advantage, 1 × filtered: gibberish"
    issue(ledger, 3)
    run_all(ledger.drop_group(3, DropReason.RUN_ENDED))
    assert ledger.describe_drops().endswith(", 1 × run_ended")
    for number in range(4, 8):
        issue(ledger, number)
        run_all(ledger.drop_group(number, DropReason.TOO_FEW, f"{number} attempts failed"))
    assert ledger.describe_drops().endswith(", 2 for other reasons")


def test_opening_the_ledger_of_an_eval_run_is_refused(tmp_path):
    RunStore.open(tmp_path).close()
    with RunStore.open(tmp_path, write=False) as store, pytest.raises(ConfigInvalid, match="not a training run"):
        Ledger.open_readonly(store)


def test_nan_and_infinite_metrics_are_stored(ledger, store):
    log = RunLog(store)
    log.log_metrics(3, {"grad_norm": math.nan, "loss": math.inf, "lr": 0.5}).result(10)
    values = {point.name: point.value for point in log.metrics()}
    assert math.isnan(values.pop("grad_norm"))
    assert values == {"loss": math.inf, "lr": 0.5}


def test_readers_see_the_last_value_of_a_metric(ledger, store):
    log = RunLog(store)
    log.log_metrics(0, {"reward/all/mean": 0.25, "loss": 1.0})
    log.log_metrics(1, {"reward/all/mean": 0.5})
    log.log_event("restarted", component="trainer", step=0)
    log.log_metrics(0, {"loss": 2.0}).result(10)
    assert [tuple(point) for point in log.metrics()] == [
        (0, "loss", 2.0),
        (0, "reward/all/mean", 0.25),
        (1, "reward/all/mean", 0.5),
    ]
    assert [point.value for point in log.metrics("reward/*")] == [0.25, 0.5]
    (event,) = log.events("restarted")
    assert event.fields == {"component": "trainer", "step": 0}
    assert store.select("SELECT count(*) FROM metrics") == [(4,)]


# -- the audit -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished_run():
    """Two epochs of two tasks: three groups trained in two steps, one dropped."""
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder:
        with RunStore.open(Path(folder)) as store:
            ledger = Ledger.open(store)
            run_all(ledger.declare_source("reverse", 2))
            for number in range(4):
                run_all(ledger.issue_groups([GroupRecord(number, "reverse", number % 2, 1, epoch=number // 2)]))
                sample(ledger, number, 0)
                run_all(
                    ledger.drop_group(number, DropReason.FILTERED, "zero_advantage")
                    if number == 2
                    else ledger.record_scored(number)
                )
            record_batch(ledger, 0, 1, 0)
            record_batch(ledger, 1, 3)
            train(ledger, 0)
            train(ledger, 1)
            commit(ledger, 1)
            replace_trainer(ledger)
            train(ledger, 1)
            commit(ledger, 2)
            assert audit(ledger) == []
        yield Path(folder)


@pytest.fixture
def history(finished_run):
    """A writable copy of the finished run."""
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder:
        shutil.copytree(finished_run, folder, dirs_exist_ok=True)
        with RunStore.open(Path(folder)) as store:
            yield Ledger.open(store)


PROBLEM_BY_FORGERY = {
    "UPDATE groups SET state = 'issued', step = NULL WHERE number = 2": "group 2 is issued: neither trained nor",
    "UPDATE groups SET reason = NULL WHERE number = 2": "group 2 was dropped without a reason",
    "UPDATE groups SET step = 1 WHERE number = 0": "group 0 is trained in step 1, but its batch does not have it",
    "UPDATE marks SET value = 1 WHERE name = 'committed'": "group 3 is trained in step 1, but the history ends before",
    "UPDATE groups SET state = 'batched' WHERE number = 3": "group 3 was in step 1, which is committed, but",
    "UPDATE batches SET members = X'9203 03' WHERE step = 1": "group 3 is 2 times in the batch of step 1",
    "UPDATE batches SET members = X'9203 00' WHERE step = 1": "group 0 is in the batches of steps 0, 1",
    "UPDATE batches SET members = X'9203 02' WHERE step = 1": "group 2 is dropped, but in the batch of step 1",
    "UPDATE batches SET members = X'9203 09' WHERE step = 1": "step 1 has group 9, which was never issued",
    "DELETE FROM batches WHERE step = 0": "step 0 has no batch",
    "UPDATE served SET members = X'9100' WHERE incarnation = 1": "trainer 1 received groups [0] for step 1",
    "DELETE FROM served WHERE step = 0": "step 0 is committed, but its batch was served to no trainer",
    "DELETE FROM groups WHERE number = 1": "group 2 is in the place of group 1",
    "DELETE FROM attempts WHERE number = 3": "group 3 should have 1 attempts, it has []",
    "UPDATE attempts SET state = 'scored' WHERE number = 3": "attempt 0 of group 3 is scored, but its group is trained",
    "DELETE FROM rollouts WHERE id = 'r30'": "attempt 0 of group 3 is trained, but its rollout r30 is not in the run",
    "UPDATE groups SET task = 0 WHERE number = 1": "epoch 0 of reverse issued tasks [0] more than once",
    "UPDATE groups SET epoch = 1 WHERE number = 1": "epoch 0 of reverse is over, but tasks [1] were never issued",
}


@pytest.mark.promise
@pytest.mark.parametrize("forgery", PROBLEM_BY_FORGERY)
def test_the_audit_describes_each_inconsistency_in_one_line(history, forgery):
    connection = sqlite3.connect(history.store.path / "run.sqlite", isolation_level=None)
    connection.execute(forgery.replace("X'9203 0", "X'92030"))
    connection.close()
    assert any(line.startswith(PROBLEM_BY_FORGERY[forgery]) for line in audit(history)), audit(history)


def test_unfinished_groups_are_consistent_in_an_unfinished_run(history):
    run_all(history.issue_groups([GroupRecord(4, "reverse", 0, 1, epoch=2)]))
    assert audit(history, finished=False) == []
    assert audit(history) == ["group 4 is issued: neither trained nor dropped"]
