"""A run that is killed at any moment loses no group and counts none twice.

A state machine changes a ledger at random beside a plain model of it. A crash copies the files as they are, with the
write-ahead log truncated somewhere inside the last change. The resumed run has every acknowledged change, and the last
one completely or not at all.
"""

import asyncio
import copy
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ramify.run.store import RunStore
from ramify.run.store.audit import audit
from ramify.run.store.group_state import DropReason, GroupState
from ramify.run.store.ledger import BatchRecord, GroupRecord, Ledger
from tests.support.ledgers import make_commit
from tests.support.traces import make_rollout

pytestmark = pytest.mark.promise

TMPFS = "/dev/shm" if Path("/dev/shm").is_dir() else None  # syncs are free there
WAL = "run.sqlite-wal"
NUM_TASKS = 3


@dataclass
class Model:
    """The expected contents of the ledger."""

    groups: list[str] = field(default_factory=list)
    attempts: list[list[str]] = field(default_factory=list)
    batches: list[tuple[int, ...]] = field(default_factory=list)
    position: int = 0
    committed: int = 0
    acknowledged: int = 0
    incarnation: int = 0

    def move(self, number: int, state: str) -> None:
        self.groups[number] = state
        self.attempts[number] = [old if old == "dropped" else state for old in self.attempts[number]]

    def end_attempt(self, number: int, attempt: int, state: str) -> None:
        self.attempts[number][attempt] = state
        if "issued" not in self.attempts[number]:
            self.groups[number] = "sampled"

    def in_state(self, state: str) -> list[int]:
        return [number for number, group_state in enumerate(self.groups) if group_state == state]

    def running(self) -> list[tuple[int, int]]:
        """Return (group, attempt) for every attempt that has not ended."""
        return [
            (number, attempt)
            for number in self.in_state("issued")
            for attempt, state in enumerate(self.attempts[number])
            if state == "issued"
        ]


def read_model(ledger: Ledger) -> Model:
    groups = ledger.groups()
    progress = ledger.progress()
    return Model(
        [group.state.value for group in groups],
        [[attempt.state.value for attempt in ledger.attempts(group.number)] for group in groups],
        [batch.group_numbers for batch in ledger.batches()],
        ledger.load_states().get("position", 0),
        progress.committed,
        progress.acknowledged,
        progress.incarnation,
    )


class Run(RuleBasedStateMachine):
    """A run and its trainer, both of which are killed at random."""

    @initialize()
    def begin(self) -> None:
        self.folders = [tempfile.mkdtemp(dir=TMPFS)]
        self.open()
        self.model = self.before = Model()
        self.last_change: tuple[int, int] = (0, 0)  # length of the log before and after it
        self.run(lambda ledger: ledger.register_trainer())
        self.run(lambda ledger: ledger.declare_source("reverse", NUM_TASKS))

    def open(self) -> None:
        self.store = RunStore.open(Path(self.folders[-1]))
        self.ledger = Ledger.open(self.store)

    def log_length(self) -> int:
        path = Path(self.folders[-1]) / WAL
        return path.stat().st_size if path.exists() else 0

    def run(self, change, expected: Model | None = None) -> None:
        """Make a change, and remember the model from before it."""
        start = self.log_length()
        asyncio.run(change(self.ledger))
        self.before, self.model = self.model, expected or self.model
        self.last_change = (start, self.log_length())

    def copy_model(self) -> Model:
        return copy.deepcopy(self.model)

    @rule(size=st.integers(1, 3))
    def issue(self, size: int) -> None:
        expected, number = self.copy_model(), len(self.model.groups)
        expected.groups.append("issued")
        expected.attempts.append(["issued"] * size)
        expected.position += 1
        epoch, task = divmod(self.model.position, NUM_TASKS)
        group = GroupRecord(number, "reverse", task, size, epoch, self.model.incarnation, self.model.acknowledged)
        self.run(lambda ledger: ledger.issue_groups([group], {"position": expected.position}), expected)

    @precondition(lambda self: self.model.running())
    @rule(data=st.data(), outcome=st.sampled_from(["sampled", "sampled", "sampled", "dropped", "retried"]))
    def end_attempt(self, data, outcome: str) -> None:
        number, attempt = data.draw(st.sampled_from(self.model.running()))
        expected = self.copy_model()
        if outcome == "retried":
            self.run(lambda ledger: ledger.retry_attempt(number, attempt, "ProcessDied"))
            return
        expected.end_attempt(number, attempt, outcome)
        record_and_traces = make_rollout(100 * number + attempt)
        if outcome == "sampled":
            self.run(lambda ledger: ledger.record_sampled(number, attempt, *record_and_traces), expected)
        else:
            self.run(lambda ledger: ledger.drop_attempt(number, attempt, DropReason.FAILED, "ProcessDied"), expected)

    @precondition(lambda self: self.model.in_state("sampled"))
    @rule(data=st.data(), is_kept=st.booleans())
    def score_or_drop(self, data, is_kept: bool) -> None:
        number = data.draw(st.sampled_from(self.model.in_state("sampled")))
        expected = self.copy_model()
        expected.move(number, "scored" if is_kept else "dropped")
        if is_kept:
            self.run(lambda ledger: ledger.record_scored(number), expected)
        else:
            self.run(lambda ledger: ledger.drop_group(number, DropReason.FILTERED, "zero_advantage"), expected)

    @precondition(lambda self: self.model.in_state("scored"))
    @rule(data=st.data())
    def form_batch(self, data) -> None:
        groups = tuple(data.draw(st.lists(st.sampled_from(self.model.in_state("scored")), unique=True, min_size=1)))
        expected, step = self.copy_model(), len(self.model.batches)
        expected.batches.append(groups)
        for number in groups:
            expected.move(number, "batched")
        self.run(lambda ledger: ledger.record_batch(BatchRecord(step, groups, b"", {})), expected)

    @precondition(lambda self: self.model.acknowledged < len(self.model.batches))
    @rule()
    def train(self) -> None:
        step = self.model.acknowledged
        self.run(lambda ledger: ledger.record_served(step, incarnation=self.model.incarnation))
        expected = self.copy_model()
        expected.acknowledged += 1
        self.run(lambda ledger: ledger.acknowledge_step(step, incarnation=self.model.incarnation), expected)

    @precondition(lambda self: self.model.committed < self.model.acknowledged)
    @rule(data=st.data())
    def commit(self, data) -> None:
        version = data.draw(st.integers(self.model.committed + 1, self.model.acknowledged))
        expected = self.copy_model()
        expected.committed = version
        for groups in expected.batches[:version]:
            for number in groups:
                expected.move(number, "trained")
        self.run(lambda ledger: ledger.commit_version(make_commit(ledger, version)), expected)

    @rule()
    def kill_trainer(self) -> None:
        expected = self.copy_model()
        expected.incarnation += 1
        expected.acknowledged = expected.committed
        self.run(lambda ledger: ledger.register_trainer(), expected)

    @rule(share=st.floats(0, 1))
    def kill_run(self, share: float) -> None:
        """Resume from a copy of the files with the log truncated inside the last change."""
        self.folders.append(tempfile.mkdtemp(dir=TMPFS))
        old, new = Path(self.folders[-2]), Path(self.folders[-1])
        shutil.copytree(old, new, dirs_exist_ok=True)
        start, stop = self.last_change
        if start < stop:
            os.truncate(new / WAL, start + round(share * (stop - start)))
        self.store.close()
        self.open()
        resumed = read_model(self.ledger)
        assert resumed in (self.before, self.model)
        assert share < 1 or resumed == self.model
        self.before = self.model = resumed
        self.last_change = (0, 0)
        self.kill_trainer()

    @invariant()
    def ledger_equals_model(self) -> None:
        if hasattr(self, "ledger"):
            assert read_model(self.ledger) == self.model
            assert audit(self.ledger, finished=False) == []

    def teardown(self) -> None:
        """Finish the run: every group must be trained or dropped exactly once."""
        if not hasattr(self, "ledger"):
            return
        for number, attempt in self.model.running():
            asyncio.run(self.ledger.record_sampled(number, attempt, *make_rollout(100 * number + attempt)))
        for group in self.ledger.open_groups():
            if group.state is not GroupState.SCORED:
                asyncio.run(self.ledger.record_scored(group.number))
        scored = tuple(group.number for group in self.ledger.open_groups())
        if scored:
            asyncio.run(self.ledger.record_batch(BatchRecord(len(self.model.batches), scored, b"", {})))
        for batch in self.ledger.batches(self.model.acknowledged):
            asyncio.run(self.ledger.record_served(batch.step, incarnation=self.model.incarnation))
            asyncio.run(self.ledger.acknowledge_step(batch.step, incarnation=self.model.incarnation))
        asyncio.run(self.ledger.commit_version(make_commit(self.ledger, len(self.ledger.batches()))))
        assert audit(self.ledger) == []
        trained = [number for batch in self.ledger.batches() for number in batch.group_numbers]
        dropped = [group.number for group in self.ledger.groups() if group.state is GroupState.DROPPED]
        assert sorted([*trained, *dropped]) == list(range(len(self.model.groups)))
        self.store.close()
        for folder in self.folders:
            shutil.rmtree(folder)


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=200 if os.environ.get("RAMIFY_FULL") else 6, stateful_step_count=30)
