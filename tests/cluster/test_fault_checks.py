"""The checks of `tests.cluster.faults` find what they look for."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ramify.run.store import RunStore
from ramify.run.store.ledger import BatchRecord, CommitRecord, GroupRecord, Ledger
from tests.cluster.ledger_check import check_heads, check_ledger, check_trainer_logs, read_commits, read_trainer_logs
from tests.cluster.process_monitor import Copy, compute_overlaps
from tests.cluster.run_events import RunEvents
from tests.support.traces import make_rollout

TRAINER_LOG = """
trainer ranks=2 token=0 committed=0 layout=forest
step=0 loss=0.1
checkpoint=1 seconds=0.1
step=1 loss=0.1
trainer ranks=2 token=1 committed=1 layout=forest
step=1 loss=0.1
checkpoint=2 seconds=0.1
"""


async def _train_two_steps(ledger: Ledger) -> None:
    """Train a group per step; the second one by a second trainer, which replaced the first."""
    for step in range(2):
        await ledger.register_trainer()
        token = ledger.progress().incarnation
        await ledger.issue_groups([GroupRecord(step, "reverse", step, 1, incarnation=token, version=step)])
        await ledger.record_sampled(step, 0, *make_rollout(step))
        await ledger.record_scored(step)
        await ledger.record_batch(BatchRecord(step, (step,), b"", {}))
        await ledger.record_served(step, incarnation=token)
        await ledger.acknowledge_step(step, incarnation=token)
        await ledger.commit_version(CommitRecord(step + 1, token, f"step_00000{step + 1}-{token}", "digest"))


@pytest.fixture
def database(tmp_path) -> Path:
    with RunStore.open(tmp_path / "run") as store:
        asyncio.run(_train_two_steps(Ledger.open(store)))
    return tmp_path / "run" / "run.sqlite"


def test_ledger_and_logs_of_a_sound_run_have_no_problems(database):
    commits = read_commits(database)
    assert [commit[:2] for commit in commits] == [(1, "0"), (2, "1")]
    assert check_ledger(database) == []
    assert list(check_trainer_logs(read_trainer_logs([TRAINER_LOG]), commits)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE groups SET number = 5 WHERE number = 1", "a group was lost"),
        ("UPDATE groups SET state = 'batched' WHERE number = 1", "neither trained nor dropped"),
        ("UPDATE groups SET task = 0", "a task was issued twice"),
        ("UPDATE groups SET incarnation = 9 WHERE number = 0", "issued under a newer trainer"),
        ("DELETE FROM attempts WHERE number = 1", "too few or too many attempts"),
        ("UPDATE attempts SET rollout = (SELECT min(rollout) FROM attempts)", "one rollout counts for two attempts"),
        ("DELETE FROM rollouts", "no stored rollout"),
        ("UPDATE commits SET incarnation = 2 WHERE version = 1", "an older trainer committed after a newer one"),
        ("UPDATE served SET incarnation = 7 WHERE step = 1", "was not served to the trainer that committed it"),
        ("UPDATE batches SET members = x'920001' WHERE step = 1", "a group is in the batches of two steps"),
        ("DELETE FROM batches WHERE step = 0", "committed steps without a batch: [0]"),
    ],
)
def test_ledger_in_which_something_counts_twice_or_not_at_all_is_found(database, change, problem):
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(change)
    assert any(problem in line for line in check_ledger(database))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("step=1 loss=0.1\ntrainer", "step=1 loss=0.1\ncheckpoint=2 seconds=0.1\ntrainer", "acknowledged to trainer 0"),
        ("token=1 committed=1", "token=1 committed=0", "trainer 1 continued version 0"),
        ("token=1", "token=0", "two trainers have the same token"),
    ],
)
def test_trainer_whose_log_contradicts_the_ledger_is_found(database, old, new, problem):
    logs = read_trainer_logs([TRAINER_LOG.replace(old, new)])
    assert any(problem in line for line in check_trainer_logs(logs, read_commits(database)))


def test_every_older_term_must_be_sealed(tmp_path):
    for term, entries in {0: [b"entry", b"sealed"], 1: [b"entry"]}.items():
        (tmp_path / "ledger" / str(term)).mkdir(parents=True)
        (tmp_path / "term").mkdir(exist_ok=True)
        (tmp_path / "term" / str(term)).write_text("[0, 0]" if term else "null")
        for number, data in enumerate(entries):
            (tmp_path / "ledger" / str(term) / str(number)).write_bytes(data)
    assert list(check_heads(tmp_path, [(1, "1.0", "", "")])) == []
    (tmp_path / "ledger" / "0" / "2").write_bytes(b"entry")
    assert any("expected one seal, at its end" in line for line in check_heads(tmp_path, []))


def test_overlap_is_counted_from_the_start_of_the_newer_copy_to_the_end_of_the_older_one():
    copies = [
        Copy("engine", "host2", 1, 0.0, ended_at=12.0),
        Copy("engine", "host3", 2, 10.0),
        Copy("trainer", "host2", 3, 0.0, "0", ended_at=5.0),
        Copy("trainer", "host3", 4, 0.1, "0", ended_at=6.0),
        Copy("trainer", "host2", 5, 9.0, "1"),
    ]
    overlaps = [(new.pid, old.pid, seconds) for new, old, seconds in compute_overlaps(copies, now=20.0)]
    assert overlaps == [(5, 4, -3.0), (2, 1, 2.0)]


def test_lines_of_a_log_get_the_time_at_which_they_are_read(tmp_path):
    events, log = RunEvents(), tmp_path / "logs" / "trainer.log"
    events.follow(tmp_path)
    events.poll()
    log.parent.mkdir()
    log.write_text("step=0 loss=1\nstep=1 lo")
    events.poll()
    first_at, first_step = events.steps[0]
    assert first_step == 0 and events.find_step(first_at) is None
    log.write_text("step=0 loss=1\nstep=1 loss=2\ncheckpoint=2 seconds=1\nstep=1 loss=2\n")
    events.poll()
    assert [step for _, step in events.steps] == [0, 1, 1]
    assert events.find_commit(first_at) is not None
    assert events.count_repeated_steps(events.steps[1][0] - 1e-9) == 0


def test_lines_from_before_a_run_directory_is_followed_are_not_new(tmp_path):
    log = tmp_path / "logs" / "trainer.log"
    log.parent.mkdir()
    log.write_text("step=0 loss=1\n")
    events = RunEvents()
    events.follow(tmp_path)
    events.poll()
    assert events.steps == []
    log.rename(log.with_suffix(".old"))
    log.write_text("step=3 loss=1\n")
    events.poll()
    assert [step for _, step in events.steps] == [3]
