"""A run that is killed at any moment loses no group and doubles none.

A machine drives a ledger at random beside a plain model of it. A crash is what a crash is: the files as they are at
that moment, the end of the log torn off somewhere inside the last change. The run goes on from them; what was
acknowledged is there, and the last change happened or did not, never by halves.
"""

import asyncio
import copy
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ramify.store import RunStore
from ramify.store.audit import audit
from ramify.store.group_state import DropReason, GroupState
from ramify.store.ledger import BatchRecord, GroupRecord, Ledger
from tests.store.rollouts import rollout

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where a sync costs nothing
WAL = "run.sqlite-wal"
TASKS = 3


@dataclass
class Model:
    """What should be in the ledger."""

    groups: list[str] = field(default_factory=list)
    attempts: list[list[str]] = field(default_factory=list)
    batches: list[tuple[int, ...]] = field(default_factory=list)
    position: int = 0
    committed: int = 0
    acknowledged: int = 0
    incarnation: int = 0

    def follow(self, number: int, state: str) -> None:
        self.groups[number] = state
        self.attempts[number] = [each if each == "dropped" else state for each in self.attempts[number]]

    def settle(self, number: int, attempt: int, state: str) -> None:
        self.attempts[number][attempt] = state
        if "issued" not in self.attempts[number]:
            self.groups[number] = "sampled"

    def found(self, state: str) -> list[int]:
        return [number for number, each in enumerate(self.groups) if each == state]

    def missing(self) -> list[tuple[int, int]]:
        """Attempts of groups that are not over, still to be run."""
        return [
            (number, attempt)
            for number in self.found("issued")
            for attempt, state in enumerate(self.attempts[number])
            if state == "issued"
        ]


def seen(ledger: Ledger) -> Model:
    groups = ledger.groups()
    marks = ledger.progress()
    return Model(
        [group.state.value for group in groups],
        [[attempt.state.value for attempt in ledger.attempts(group.number)] for group in groups],
        [batch.group_numbers for batch in ledger.batches()],
        ledger.load_states().get("position", 0),
        marks.committed,
        marks.acknowledged,
        marks.incarnation,
    )


class Run(RuleBasedStateMachine):
    """A run with a trainer, both of which die now and then."""

    @initialize()
    def begin(self) -> None:
        self.folders = [tempfile.mkdtemp(dir=MEMORY)]
        self.open()
        self.model = self.before = Model()
        self.torn: tuple[int, int] = (0, 0)  # length of the log before and after the last change
        self.do(lambda ledger: ledger.declare("reverse", TASKS))

    def open(self) -> None:
        self.store = RunStore.open(Path(self.folders[-1]))
        self.ledger = Ledger.open(self.store)

    def log(self) -> int:
        path = Path(self.folders[-1]) / WAL
        return path.stat().st_size if path.exists() else 0

    def do(self, change, expected: Model | None = None) -> None:
        """Make a change, and remember how the run looked before it."""
        start = self.log()
        asyncio.run(change(self.ledger))
        self.before, self.model = self.model, expected or self.model
        self.torn = (start, self.log())

    def then(self) -> Model:
        return copy.deepcopy(self.model)

    @rule(size=st.integers(1, 3))
    def issue(self, size: int) -> None:
        then, number = self.then(), len(self.model.groups)
        then.groups.append("issued")
        then.attempts.append(["issued"] * size)
        then.position += 1
        epoch, task = divmod(self.model.position, TASKS)
        group = GroupRecord(number, "reverse", task, size, epoch, self.model.incarnation, self.model.acknowledged)
        self.do(lambda ledger: ledger.issue(group, {"position": then.position}), then)

    @precondition(lambda self: self.model.missing())
    @rule(data=st.data(), fate=st.sampled_from(["sampled", "sampled", "sampled", "dropped", "again"]))
    def end_attempt(self, data, fate: str) -> None:
        number, attempt = data.draw(st.sampled_from(self.model.missing()))
        then = self.then()
        if fate == "again":
            self.do(lambda ledger: ledger.retry(number, attempt, "WorkerDied"))
            return
        then.settle(number, attempt, fate)
        kept = rollout(100 * number + attempt)
        if fate == "sampled":
            self.do(lambda ledger: ledger.sampled(number, attempt, *kept), then)
        else:
            self.do(lambda ledger: ledger.drop_attempt(number, attempt, DropReason.FAILED, "WorkerDied"), then)

    @precondition(lambda self: self.model.found("sampled"))
    @rule(data=st.data(), good=st.booleans())
    def judge(self, data, good: bool) -> None:
        number = data.draw(st.sampled_from(self.model.found("sampled")))
        then = self.then()
        then.follow(number, "scored" if good else "dropped")
        if good:
            self.do(lambda ledger: ledger.scored(number), then)
        else:
            self.do(lambda ledger: ledger.drop(number, DropReason.FILTERED, "zero_advantage"), then)

    @precondition(lambda self: self.model.found("scored"))
    @rule(data=st.data())
    def cut(self, data) -> None:
        groups = tuple(data.draw(st.lists(st.sampled_from(self.model.found("scored")), unique=True, min_size=1)))
        then, step = self.then(), len(self.model.batches)
        then.batches.append(groups)
        for number in groups:
            then.follow(number, "batched")
        self.do(lambda ledger: ledger.batch(BatchRecord(step, groups, b"", {})), then)

    @precondition(lambda self: self.model.acknowledged < len(self.model.batches))
    @rule()
    def train(self) -> None:
        step = self.model.acknowledged
        self.do(lambda ledger: ledger.serve(step))
        then = self.then()
        then.acknowledged += 1
        self.do(lambda ledger: ledger.acknowledge(step), then)

    @precondition(lambda self: self.model.committed < self.model.acknowledged)
    @rule(data=st.data())
    def commit(self, data) -> None:
        version = data.draw(st.integers(self.model.committed + 1, self.model.acknowledged))
        then = self.then()
        then.committed = version
        for groups in then.batches[:version]:
            for number in groups:
                then.follow(number, "trained")
        self.do(lambda ledger: ledger.commit(version), then)

    @rule()
    def kill_the_trainer(self) -> None:
        then = self.then()
        then.incarnation += 1
        then.acknowledged = then.committed
        self.do(lambda ledger: ledger.restart(), then)

    @rule(share=st.floats(0, 1))
    def kill_the_run(self, share: float) -> None:
        """The files as they are now, the log torn somewhere in the last change."""
        self.folders.append(tempfile.mkdtemp(dir=MEMORY))
        old, new = Path(self.folders[-2]), Path(self.folders[-1])
        shutil.copytree(old, new, dirs_exist_ok=True)
        start, stop = self.torn
        if start < stop:
            os.truncate(new / WAL, start + round(share * (stop - start)))
        self.store.close()
        self.open()
        now = seen(self.ledger)
        assert now in (self.before, self.model)
        assert share < 1 or now == self.model
        self.before = self.model = now
        self.torn = (0, 0)
        self.kill_the_trainer()

    @invariant()
    def the_ledger_is_what_was_decided(self) -> None:
        if hasattr(self, "ledger"):
            assert seen(self.ledger) == self.model
            assert audit(self.ledger, finished=False) == []

    def teardown(self) -> None:
        """Whatever happened, the run can be finished, and then every group has its one end."""
        if not hasattr(self, "ledger"):
            return
        for number, attempt in self.model.missing():
            asyncio.run(self.ledger.record_sampled(number, attempt, *rollout(100 * number + attempt)))
        for group in self.ledger.open_groups():
            if group.state is not GroupState.SCORED:
                asyncio.run(self.ledger.record_scored(group.number))
        left = tuple(group.number for group in self.ledger.open_groups())
        if left:
            asyncio.run(self.ledger.record_batch(BatchRecord(len(self.model.batches), left, b"", {})))
        for batch in self.ledger.batches(self.model.acknowledged):
            asyncio.run(self.ledger.record_served(batch.step))
            asyncio.run(self.ledger.acknowledge_step(batch.step))
        asyncio.run(self.ledger.commit_version(len(self.ledger.batches())))
        assert audit(self.ledger) == []
        trained = [number for batch in self.ledger.batches() for number in batch.group_numbers]
        dropped = [group.number for group in self.ledger.groups() if group.state is GroupState.DROPPED]
        assert sorted([*trained, *dropped]) == list(range(len(self.model.groups)))
        self.store.close()
        for folder in self.folders:
            shutil.rmtree(folder)


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=200 if os.environ.get("RAMIFY_FULL") else 8, stateful_step_count=40)
