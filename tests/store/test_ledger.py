"""The ledger keeps its promise: whatever dies, every group is trained in exactly one step or dropped by name."""

import asyncio
import math
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest

from ramify.errors import ConfigInvalid, TransitionRefused
from ramify.store import RunStore
from ramify.store.audit import audit
from ramify.store.group_state import TRANSITIONS, DropReason, GroupState, check_transition
from ramify.store.ledger import BatchRecord, GroupRecord, Ledger, LedgerProgress
from ramify.store.run_log import RunLog
from tests.store.rollouts import rollout

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where a sync costs nothing


@pytest.fixture
def store():
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, RunStore.open(Path(folder)) as store:
        yield store


@pytest.fixture
def ledger(store):
    return Ledger.open(store)


def do(*changes):
    async def one_after_the_other():
        return [await change for change in changes][-1]

    return asyncio.run(one_after_the_other())


def issue(ledger, number, *, size=2, **more):
    do(ledger.issue(GroupRecord(number, "reverse", number, size, **more)))


def sample(ledger, number, attempt):
    row, traces = rollout(number * 10 + attempt)
    do(ledger.sampled(number, attempt, row, traces))


def score(ledger, number, *, size=2, **more):
    issue(ledger, number, size=size, **more)
    for attempt in range(size):
        sample(ledger, number, attempt)
    do(ledger.scored(number))


def cut(ledger, step, *groups):
    do(ledger.batch(BatchRecord(step, groups, b"notes", {"rl": 4})))


def train(ledger, step):
    do(ledger.serve(step), ledger.acknowledge(step))


def states(ledger):
    return [group.state.value for group in ledger.groups()]


@pytest.mark.parametrize("now", GroupState)
@pytest.mark.parametrize("then", GroupState)
def test_only_the_transitions_of_the_table_are_allowed(now, then):
    if then in TRANSITIONS[now]:
        check_transition("group 0", now, then)
    else:
        with pytest.raises(TransitionRefused, match=f"group 0 is {now.value} and cannot become {then.value}"):
            check_transition("group 0", now, then)


def test_a_group_goes_from_issue_to_history(ledger):
    issue(ledger, 0, incarnation=1, version=3)
    assert states(ledger) == ["issued"]
    sample(ledger, 0, 0)
    assert states(ledger) == ["issued"]
    sample(ledger, 0, 1)
    assert states(ledger) == ["sampled"]
    do(ledger.scored(0, {1: {"advantage": -0.5}}))
    cut(ledger, 0, 0)
    train(ledger, 0)
    assert states(ledger) == ["batched"]
    assert ledger.marks() == LedgerProgress(committed=0, acknowledged=1)
    do(ledger.commit(1))
    assert ledger.marks() == LedgerProgress(committed=1, acknowledged=1)
    assert ledger.group(0) == GroupRecord(0, "reverse", 0, 2, 0, 1, 3, GroupState.TRAINED, 0)
    assert [attempt.state for attempt in ledger.attempts(0)] == [GroupState.TRAINED] * 2
    assert ledger.attempts(0)[1].notes == {"advantage": -0.5}
    assert ledger.store.read(ledger.attempts(0)[1].rollout)[0].last_reply == "reply 1"
    assert audit(ledger) == []


def test_an_attempt_that_leaves_completes_its_group_as_well(ledger):
    issue(ledger, 0)
    do(ledger.retry(0, 0, "ProviderError"), ledger.drop_attempt(0, 0, DropReason.FAILED, "ProviderError: gone"))
    sample(ledger, 0, 1)
    assert states(ledger) == ["sampled"]
    gone = ledger.attempts(0)[0]
    assert (gone.tries, gone.state, gone.reason, gone.detail) == (
        2,
        GroupState.DROPPED,
        DropReason.FAILED,
        "ProviderError: gone",
    )
    do(ledger.scored(0))
    cut(ledger, 0, 0)
    train(ledger, 0)
    do(ledger.commit(1))
    assert [attempt.state for attempt in ledger.attempts(0)] == [GroupState.DROPPED, GroupState.TRAINED]
    assert audit(ledger) == []


def test_what_the_curriculum_became_is_kept_with_the_group_it_chose(ledger, store):
    do(ledger.issue(GroupRecord(0, "reverse", 7, 1), {"source/reverse/at": [0, 1]}), ledger.keep({"mix/reverse": 1}))
    assert ledger.states("source/reverse/") == {"at": [0, 1]}
    assert ledger.states("mix/") == {"reverse": 1}
    with pytest.raises(TransitionRefused):
        do(ledger.issue(GroupRecord(5, "reverse", 8, 1), {"source/reverse/at": [0, 2]}))
    assert ledger.states("source/reverse/") == {"at": [0, 1]}


REFUSED = {
    "group 1 cannot be issued: the next one is 2": lambda one: one.issue(GroupRecord(1, "reverse", 1, 1)),
    "group 9 was never issued": lambda one: one.scored(9),
    "group 0 is issued and cannot become scored": lambda one: one.scored(0),
    "group 1 is batched and cannot become dropped": lambda one: one.drop(1, DropReason.CANCELLED),
    "attempt 7 of group 0 was never issued": lambda one: one.retry(0, 7, "ProviderError"),
    "attempt 0 of group 1 is batched: it cannot be run again": lambda one: one.retry(1, 0, "ProviderError"),
    "attempt 0 of group 1 is batched and cannot become sampled": lambda one: one.sampled(1, 0, *rollout(3)),
    "batch 3 cannot be cut: the next one is 1": lambda one: one.batch(BatchRecord(3, (0,), b"", {})),
    "group 1 is batched and cannot become batched": lambda one: one.batch(BatchRecord(1, (1,), b"", {})),
    "batch 1 cannot be served: it was never cut": lambda one: one.serve(1),
    "step 0 cannot be done: this trainer was never given its batch": lambda one: one.acknowledge(0),
    "version 1 cannot be committed: between 0 and 0 may be": lambda one: one.commit(1),
}


def test_an_illegal_step_is_refused_by_name_and_changes_nothing(ledger):
    issue(ledger, 0)
    score(ledger, 1)
    cut(ledger, 0, 1)
    before = ledger.groups(), ledger.attempts(), ledger.batches(), ledger.marks()
    for problem, change in REFUSED.items():
        with pytest.raises(TransitionRefused, match=problem):
            do(change(ledger))
        assert (ledger.groups(), ledger.attempts(), ledger.batches(), ledger.marks()) == before


def test_a_new_trainer_is_served_the_batches_after_the_history_again(ledger):
    for step in range(3):
        score(ledger, 2 * step)
        score(ledger, 2 * step + 1)
        cut(ledger, step, 2 * step + 1, 2 * step)
        train(ledger, step)
    do(ledger.commit(1))
    assert do(ledger.restart()) == LedgerProgress(committed=1, acknowledged=1, incarnation=1)
    assert [(batch.step, batch.groups) for batch in ledger.batches(1)] == [(1, (3, 2)), (2, (5, 4))]
    with pytest.raises(TransitionRefused, match="part of the history"):
        do(ledger.serve(0))
    train(ledger, 1)
    train(ledger, 2)
    do(ledger.commit(3))
    assert [(incarnation, step) for incarnation, step, _ in ledger.served()] == [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert audit(ledger) == []


def test_a_history_that_is_rolled_back_serves_the_same_batches_and_counts_each_group_once(ledger):
    for step in range(3):
        score(ledger, step)
        cut(ledger, step, step)
        train(ledger, step)
    do(ledger.commit(3))
    with pytest.raises(TransitionRefused, match="cannot end at version 4: it ends at 3"):
        do(ledger.roll_back(4))
    do(ledger.roll_back(1))
    assert ledger.marks() == LedgerProgress(committed=1, acknowledged=1, incarnation=1)
    assert states(ledger) == ["trained", "batched", "batched"]
    assert [attempt.state for attempt in ledger.attempts(2)] == [GroupState.BATCHED] * 2
    assert audit(ledger, finished=False) == []
    assert [batch.step for batch in ledger.batches(1)] == [1, 2]
    for step in (1, 2):
        train(ledger, step)
    do(ledger.commit(3))
    assert states(ledger) == ["trained"] * 3
    assert audit(ledger) == []


def test_a_run_that_goes_on_knows_which_attempts_are_missing(tmp_path):
    with RunStore.open(tmp_path) as store:
        ledger = Ledger.open(store)
        score(ledger, 0)
        issue(ledger, 1, size=3)
        sample(ledger, 1, 1)
        issue(ledger, 2)
        do(ledger.drop_group(2, DropReason.CANCELLED))
    with RunStore.open(tmp_path) as store:
        ledger = Ledger.open(store)
        assert [(group.number, group.state.value) for group in ledger.open_groups()] == [(0, "scored"), (1, "issued")]
        assert [a.attempt_index for a in ledger.attempts(1) if a.state is GroupState.ISSUED] == [0, 2]


def test_why_groups_were_dropped_is_told_by_number_of_groups(ledger):
    assert ledger.dropped() == ""
    details = ["zero_advantage", "gibberish", "zero_advantage"]
    for number, detail in enumerate(details):
        issue(ledger, number)
        do(ledger.drop(number, DropReason.FILTERED, detail))
    assert ledger.dropped() == "2 × filtered: zero_advantage, 1 × filtered: gibberish"
    issue(ledger, 3)
    do(ledger.drop(3, DropReason.RUN_ENDED))
    assert ledger.dropped().endswith(", 1 × run_ended")
    for number in range(4, 8):
        issue(ledger, number)
        do(ledger.drop(number, DropReason.TOO_FEW, f"{number} attempts failed"))
    assert ledger.dropped().endswith(", 2 for other reasons")


def test_a_run_without_a_ledger_cannot_be_read_as_one(tmp_path):
    RunStore.open(tmp_path).close()
    with RunStore.open(tmp_path, write=False) as store, pytest.raises(ConfigInvalid, match="no training run"):
        Ledger.open_readonly(store)


def test_a_metric_that_is_no_number_is_kept_with_the_others_of_its_step(ledger, store):
    journal = RunLog(store)
    journal.log_metrics(3, {"grad_norm": math.nan, "loss": math.inf, "lr": 0.5}).result(10)
    found = {point.name: point.value for point in journal.metrics()}
    assert math.isnan(found.pop("grad_norm"))
    assert found == {"loss": math.inf, "lr": 0.5}


def test_metrics_and_events_are_appended_and_the_last_value_counts(ledger, store):
    journal = RunLog(store)
    journal.log_metrics(0, {"reward/all/mean": 0.25, "loss": 1.0})
    journal.log_metrics(1, {"reward/all/mean": 0.5})
    journal.log_event("restarted", component="trainer", step=0)
    journal.log_metrics(0, {"loss": 2.0}).result(10)
    assert [tuple(point) for point in journal.metrics()] == [
        (0, "loss", 2.0),
        (0, "reward/all/mean", 0.25),
        (1, "reward/all/mean", 0.5),
    ]
    assert [point.value for point in journal.metrics("reward/*")] == [0.25, 0.5]
    (event,) = journal.events("restarted")
    assert event.fields == {"component": "trainer", "step": 0}
    assert store.select("SELECT count(*) FROM metrics") == [(4,)]


# -- the audit -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished():
    """Two epochs of two tasks: three groups trained in two steps, one dropped."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        with RunStore.open(Path(folder)) as store:
            ledger = Ledger.open(store)
            do(ledger.declare_source("reverse", 2))
            for number in range(4):
                do(ledger.issue_group(GroupRecord(number, "reverse", number % 2, 1, epoch=number // 2)))
                sample(ledger, number, 0)
                do(
                    ledger.drop_group(number, DropReason.FILTERED, "zero_advantage")
                    if number == 2
                    else ledger.record_scored(number)
                )
            cut(ledger, 0, 1, 0)
            cut(ledger, 1, 3)
            train(ledger, 0)
            train(ledger, 1)
            do(ledger.commit_version(1), ledger.begin_incarnation())
            train(ledger, 1)
            do(ledger.commit_version(2))
            assert audit(ledger) == []
        yield Path(folder)


@pytest.fixture
def history(finished):
    """A copy of that run, to be spoiled."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        shutil.copytree(finished, folder, dirs_exist_ok=True)
        with RunStore.open(Path(folder)) as store:
            yield Ledger.open(store)


FORGED = {
    "UPDATE groups SET state = 'issued', step = NULL WHERE number = 2": "group 2 is issued: neither trained nor",
    "UPDATE groups SET reason = NULL WHERE number = 2": "group 2 was dropped without a reason",
    "UPDATE groups SET step = 1 WHERE number = 0": "group 0 is trained in step 1, but its batch does not have it",
    "UPDATE marks SET value = 1 WHERE name = 'committed'": "group 3 is trained in step 1, but the history ends before",
    "UPDATE groups SET state = 'batched' WHERE number = 3": "group 3 was in step 1, which is history, but",
    "UPDATE batches SET members = X'9203 03' WHERE step = 1": "group 3 is 2 times in the batch of step 1",
    "UPDATE batches SET members = X'9203 00' WHERE step = 1": "group 0 is in the batches of steps 0, 1",
    "UPDATE batches SET members = X'9203 02' WHERE step = 1": "group 2 is dropped, but in the batch of step 1",
    "UPDATE batches SET members = X'9203 09' WHERE step = 1": "step 1 has group 9, which was never issued",
    "DELETE FROM batches WHERE step = 0": "step 0 has no batch",
    "UPDATE served SET members = X'9100' WHERE incarnation = 1": "trainer 1 was given groups [0] for step 1",
    "DELETE FROM served WHERE step = 0": "step 0 is history, but no trainer was given its batch",
    "DELETE FROM groups WHERE number = 1": "group 2 stands where group 1 should",
    "DELETE FROM attempts WHERE number = 3": "group 3 should have 1 attempts, it has []",
    "UPDATE attempts SET state = 'scored' WHERE number = 3": "attempt 0 of group 3 is scored, but its group is trained",
    "DELETE FROM rollouts WHERE id = 'r30'": "attempt 0 of group 3 is trained, but its rollout r30 is not in the run",
    "UPDATE groups SET task = 0 WHERE number = 1": "epoch 0 of reverse issued tasks [0] more than once",
    "UPDATE groups SET epoch = 1 WHERE number = 1": "epoch 0 of reverse is over, but tasks [1] were never issued",
}


@pytest.mark.parametrize("forgery", FORGED)
def test_the_audit_says_in_a_line_what_does_not_agree(history, forgery):
    connection = sqlite3.connect(history.store.path / "run.sqlite", isolation_level=None)
    connection.execute(forgery.replace("X'9203 0", "X'92030"))
    connection.close()
    assert any(line.startswith(FORGED[forgery]) for line in audit(history)), audit(history)


def test_groups_on_their_way_are_no_problem_of_a_run_that_goes_on(history):
    do(history.issue(GroupRecord(4, "reverse", 0, 1, epoch=2)))
    assert audit(history, finished=False) == []
    assert audit(history) == ["group 4 is issued: neither trained nor dropped"]
