"""The ledger: a run's memory of every group it issued.

One idea: **decide, write, then act.** A batch is a row before it is served, a group is a row before it is dispatched,
and a step is part of the history in the one transaction that says so (`commit`). Whoever dies, the rows tell what was
decided, and doing it again does the same. Versions and steps count alike: version c is what c steps made, the batches
0 to c - 1, and batch s is trained on version s.
"""

import asyncio
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from ramify.errors import ConfigInvalid, TransitionRefused
from ramify.store.entries import TABLES, Attempt, Group, Marks, StoredBatch
from ramify.store.rows import Row
from ramify.store.states import DropReason, State, check_follows
from ramify.store.store import OPENING, Kept, RunStore
from ramify.store.writer import Apply
from ramify.trace import Trace

_GROUP = "number, source, task, epoch, size, incarnation, version, state, step, reason, detail"
_ATTEMPT = "number, attempt, tries, state, rollout, reason, detail, notes"
REASONS = 5  # for which groups were dropped that are told
_OPEN = (State.ISSUED.value, State.SAMPLED.value, State.SCORED.value)


class Ledger:
    """The tables, behind the run's one writer. A method that changes them returns when the change is durable."""

    def __init__(self, store: RunStore) -> None:
        self.store = store

    @classmethod
    def open(cls, store: RunStore) -> Self:
        """The ledger of a run that is open to be written; its tables are made if they are not there."""
        store.change(_create).result(OPENING)
        return cls(store)

    @staticmethod
    def is_in(store: RunStore) -> bool:
        """Return whether the store has the tables of a ledger, as every training run has."""
        return bool(store.select("SELECT 1 FROM sqlite_master WHERE name = 'groups'"))

    @classmethod
    def read(cls, store: RunStore) -> Self:
        """The ledger of a run that is open to be read. Raises ConfigInvalid if the run never trained."""
        if not cls.is_in(store):
            raise ConfigInvalid(f"{store.path} has no ledger: it is no training run")
        return cls(store)

    # -- groups and attempts -------------------------------------------------------------------------------------

    async def declare(self, source: str, tasks: int | None) -> None:
        """A source, and how many tasks make an epoch of it (None: it has no epochs)."""
        await self._change(lambda c, _: _run(c, "INSERT OR REPLACE INTO sources VALUES (?, ?)", source, tasks))

    async def issue(self, group: Group, states: Mapping[str, Any] | None = None) -> None:
        """A group before any of it is dispatched, together with what choosing it changed (`states`)."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            (count,) = connection.execute("SELECT count(*) FROM groups").fetchone()
            if group.number != count:
                raise TransitionRefused(f"group {group.number} cannot be issued: the next one is {count}")
            values = (group.source, group.task, group.epoch, group.size, group.incarnation, group.version)
            _run(connection, _insert("groups", 11), group.number, *values, State.ISSUED.value, None, None, "")
            for attempt in range(group.size):
                values = (group.number, attempt, 1, State.ISSUED.value, None, None, "", EMPTY)
                _run(connection, _insert("attempts", 8), *values)
            _keep(connection, states)

        await self._change(apply)

    def store_task(self, source: str, number: int, content: str) -> None:
        """Queue the content digest of a task that was issued; it is durable before any rollout of the task is."""
        values = (source, number, content)
        self.store.change(lambda c, _: _run(c, "INSERT OR IGNORE INTO tasks VALUES (?, ?, ?)", *values))

    async def retry(self, number: int, attempt: int, failure: str) -> None:
        """An attempt is run again, because what ended it was not the policy's doing."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            now = _attempt_state(connection, number, attempt)
            if now is not State.ISSUED:
                raise TransitionRefused(f"attempt {attempt} of group {number} is {now.value}: it cannot be run again")
            where = "WHERE number = ? AND attempt = ?"
            _run(connection, f"UPDATE attempts SET tries = tries + 1, detail = ? {where}", failure, number, attempt)

        await self._change(apply)

    async def sampled(self, number: int, attempt: int, row: Row, traces: Kept) -> None:
        """An attempt's rollout is there: its traces and this fact become part of the run together."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            _check_attempt(connection, number, attempt, State.SAMPLED)
            query = "UPDATE attempts SET state = ?, rollout = ? WHERE number = ? AND attempt = ?"
            _run(connection, query, State.SAMPLED.value, row.id, number, attempt)
            _complete(connection, number)

        await self._change(apply, [(row, traces)])

    async def drop_attempt(self, number: int, attempt: int, reason: DropReason, detail: str = "") -> None:
        """An attempt leaves its group."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            _check_attempt(connection, number, attempt, State.DROPPED)
            query = "UPDATE attempts SET state = ?, reason = ?, detail = ? WHERE number = ? AND attempt = ?"
            _run(connection, query, State.DROPPED.value, reason.value, detail, number, attempt)
            _complete(connection, number)

        await self._change(apply)

    async def scored(
        self,
        number: int,
        notes: Mapping[int, Mapping[str, Any]] | None = None,
        *,
        rollouts: Sequence[tuple[Row, Sequence[Trace]]] = (),
        states: Mapping[str, Any] | None = None,
    ) -> None:
        """A group has its rewards. `notes` is what was learnt about each attempt; `rollouts` those that changed."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            _move(connection, number, State.SCORED)
            _follow(connection, number, State.SCORED)
            for attempt, each in (notes or {}).items():
                query = "UPDATE attempts SET notes = ? WHERE number = ? AND attempt = ?"
                _run(connection, query, msgspec.msgpack.encode(dict(each)), number, attempt)
            _keep(connection, states)

        await self._change(apply, rollouts)

    async def drop(
        self, number: int, reason: DropReason, detail: str = "", *, states: Mapping[str, Any] | None = None
    ) -> None:
        """A group will not be trained on, for a reason."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            _move(connection, number, State.DROPPED)
            query = "UPDATE groups SET reason = ?, detail = ? WHERE number = ?"
            _run(connection, query, reason.value, detail, number)
            query = "UPDATE attempts SET state = ?, reason = ?, detail = ? WHERE number = ? AND state != ?"
            _run(connection, query, State.DROPPED.value, reason.value, detail, number, State.DROPPED.value)
            _keep(connection, states)

        await self._change(apply)

    # -- batches and history -------------------------------------------------------------------------------------

    async def batch(self, batch: StoredBatch) -> None:
        """A batch is decided: it may be served once this returns, and will be the same for ever."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            (count,) = connection.execute("SELECT count(*) FROM batches").fetchone()
            if batch.step != count:
                raise TransitionRefused(f"batch {batch.step} cannot be cut: the next one is {count}")
            for number in batch.groups:
                _move(connection, number, State.BATCHED)
                _follow(connection, number, State.BATCHED)
                _run(connection, "UPDATE groups SET step = ? WHERE number = ?", batch.step, number)
            members, counts = msgspec.msgpack.encode(batch.groups), msgspec.msgpack.encode(batch.counts)
            _run(connection, _insert("batches", 4), batch.step, members, batch.annotations, counts)

        await self._change(apply)

    async def serve(self, step: int) -> None:
        """The trainer of this incarnation is about to be given a batch."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            found = connection.execute("SELECT members FROM batches WHERE step = ?", (step,)).fetchone()
            if found is None:
                raise TransitionRefused(f"batch {step} cannot be served: it was never cut")
            if step < _mark(connection, "committed"):
                raise TransitionRefused(f"batch {step} cannot be served: its step is part of the history")
            values = (_mark(connection, "incarnation"), step, found[0])
            _run(connection, "INSERT OR IGNORE INTO served VALUES (?, ?, ?)", *values)

        await self._change(apply)

    async def acknowledge(self, step: int) -> None:
        """The trainer has done a step. That is not yet history: only `commit` makes it so."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            asked = (_mark(connection, "incarnation"), step)
            if not connection.execute("SELECT 1 FROM served WHERE incarnation = ? AND step = ?", asked).fetchone():
                raise TransitionRefused(f"step {step} cannot be done: this trainer was never given its batch")
            _set(connection, "acknowledged", max(step + 1, _mark(connection, "acknowledged")))

        await self._change(apply)

    async def commit(self, version: int) -> None:
        """The checkpoint of `version` is safe: the steps that made it are history, and their groups trained."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            committed, done = _mark(connection, "committed"), _mark(connection, "acknowledged")
            if not committed <= version <= done:
                raise TransitionRefused(f"version {version} cannot be committed: between {committed} and {done} may be")
            trained, batched = State.TRAINED.value, State.BATCHED.value
            inside = "number IN (SELECT number FROM groups WHERE state = ? AND step < ?)"
            query = f"UPDATE attempts SET state = ? WHERE state = ? AND {inside}"
            _run(connection, query, trained, batched, batched, version)
            _run(connection, "UPDATE groups SET state = ? WHERE state = ? AND step < ?", trained, batched, version)
            _set(connection, "committed", version)

        await self._change(apply)

    async def restart(self) -> Marks:
        """A trainer begins from the history: what was done after it is done again, by a new incarnation."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            _set(connection, "incarnation", _mark(connection, "incarnation") + 1)
            _set(connection, "acknowledged", _mark(connection, "committed"))

        await self._change(apply)
        return self.marks()

    async def roll_back(self, version: int) -> None:
        """End the history at an earlier version, because the checkpoint of the last one is lost.

        Later batches stay as they were cut and are served again, to a trainer with a new incarnation, so every group is
        still counted once.
        """

        def apply(connection: sqlite3.Connection, _: object) -> None:
            committed = _mark(connection, "committed")
            if not 0 <= version <= committed:
                raise TransitionRefused(f"the history cannot end at version {version}: it ends at {committed}")
            trained, batched = State.TRAINED.value, State.BATCHED.value
            after = "number IN (SELECT number FROM groups WHERE state = ? AND step >= ?)"
            query = f"UPDATE attempts SET state = ? WHERE state = ? AND {after}"
            _run(connection, query, batched, trained, trained, version)
            _run(connection, "UPDATE groups SET state = ? WHERE state = ? AND step >= ?", batched, trained, version)
            _set(connection, "committed", version)
            _set(connection, "acknowledged", version)
            _set(connection, "incarnation", _mark(connection, "incarnation") + 1)

        await self._change(apply)

    async def keep(self, states: Mapping[str, Any]) -> None:
        """What curricula and other parts want to find again, by name."""
        await self._change(lambda connection, _: _keep(connection, states))

    # -- reading -------------------------------------------------------------------------------------------------

    def marks(self) -> Marks:
        found: dict[str, int] = dict(self.store.select("SELECT name, value FROM marks"))
        return Marks(**found)

    def states(self, prefix: str = "") -> dict[str, Any]:
        """What is kept under names that begin with `prefix`, by the rest of the name."""
        query = "SELECT name, value FROM states WHERE substr(name, 1, ?) = ?"
        rows = self.store.select(query, (len(prefix), prefix))
        return {name.removeprefix(prefix): msgspec.msgpack.decode(value) for name, value in rows}

    def sources(self) -> dict[str, int | None]:
        """The declared sources and how many tasks make an epoch of each."""
        return dict(self.store.select("SELECT name, tasks FROM sources"))

    def groups(self) -> list[Group]:
        """All groups in the order of issue."""
        return [Group.of(row) for row in self.store.select(f"SELECT {_GROUP} FROM groups ORDER BY number")]

    def issued(self) -> int:
        """How many groups were issued."""
        return self.store.select("SELECT count(*) FROM groups")[0][0]

    def tally(self) -> dict[str, int]:
        """How many groups are in each state."""
        return dict(self.store.select("SELECT state, count(*) FROM groups GROUP BY state"))

    def dropped(self, last: int = -1) -> str:
        """Why groups were dropped, or the `last` of them, the most frequent reasons first; nothing if none was."""
        inner = "SELECT * FROM groups WHERE state = ? ORDER BY number DESC LIMIT ?"
        query = f"SELECT reason, detail, count(*) FROM ({inner}) GROUP BY reason, detail"
        rows = self.store.select(f"{query} ORDER BY count(*) DESC, min(number)", (State.DROPPED.value, last))
        told = [f"{count} × {reason or '?'}{detail and f': {detail}'}" for reason, detail, count in rows[:REASONS]]
        rest = sum(count for _, _, count in rows[REASONS:])
        return ", ".join([*told, f"{rest} for other reasons"] if rest else told)

    def open_groups(self) -> list[Group]:
        """Groups that are in no batch yet and were not dropped, in the order of issue."""
        query = f"SELECT {_GROUP} FROM groups WHERE state IN (?, ?, ?) ORDER BY number"
        return [Group.of(row) for row in self.store.select(query, _OPEN)]

    def group(self, number: int) -> Group:
        found = self.store.select(f"SELECT {_GROUP} FROM groups WHERE number = ?", (number,))
        if not found:
            raise KeyError(number)
        return Group.of(found[0])

    def attempts(self, number: int | None = None) -> list[Attempt]:
        """The attempts of a group, or of all."""
        where, values = ("", ()) if number is None else ("WHERE number = ?", (number,))
        query = f"SELECT {_ATTEMPT} FROM attempts {where} ORDER BY number, attempt"
        return [Attempt.of(row) for row in self.store.select(query, values)]

    def batches(self, first: int = 0) -> list[StoredBatch]:
        """The batches from step `first` on; those from `marks().committed` on are served to a trainer that begins."""
        query = "SELECT step, members, annotations, counts FROM batches WHERE step >= ? ORDER BY step"
        return [StoredBatch.of(row) for row in self.store.select(query, (first,))]

    def stored(self, step: int) -> StoredBatch | None:
        """The batch of a step; None if it was not cut."""
        query = "SELECT step, members, annotations, counts FROM batches WHERE step = ?"
        found = self.store.select(query, (step,))
        return StoredBatch.of(found[0]) if found else None

    def served(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(incarnation, step, groups) of every batch a trainer was given."""
        rows = self.store.select("SELECT incarnation, step, members FROM served ORDER BY step, incarnation")
        return [(incarnation, step, tuple(msgspec.msgpack.decode(members))) for incarnation, step, members in rows]

    async def _change(self, apply: Apply, rollouts: Sequence[tuple[Row, Kept]] = ()) -> None:
        await asyncio.wrap_future(self.store.change(apply, rollouts))


EMPTY = msgspec.msgpack.encode({})


def _create(connection: sqlite3.Connection, _: object) -> None:
    for statement in TABLES:
        connection.execute(statement)


def _run(connection: sqlite3.Connection, query: str, *values: object) -> None:
    connection.execute(query, values)


def _insert(table: str, columns: int) -> str:
    return f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})"


def _mark(connection: sqlite3.Connection, name: str) -> int:
    found = connection.execute("SELECT value FROM marks WHERE name = ?", (name,)).fetchone()
    return found[0] if found else 0


def _set(connection: sqlite3.Connection, name: str, value: int) -> None:
    _run(connection, "INSERT OR REPLACE INTO marks VALUES (?, ?)", name, value)


def _keep(connection: sqlite3.Connection, states: Mapping[str, Any] | None) -> None:
    for name, value in (states or {}).items():
        _run(connection, "INSERT OR REPLACE INTO states VALUES (?, ?)", name, msgspec.msgpack.encode(value))


def _move(connection: sqlite3.Connection, number: int, then: State) -> None:
    found = connection.execute("SELECT state FROM groups WHERE number = ?", (number,)).fetchone()
    if found is None:
        raise TransitionRefused(f"group {number} was never issued: it cannot become {then.value}")
    check_follows(f"group {number}", State(found[0]), then)
    _run(connection, "UPDATE groups SET state = ? WHERE number = ?", then.value, number)


def _follow(connection: sqlite3.Connection, number: int, state: State) -> None:
    """The attempts of a group go where it goes; those that were dropped stay behind."""
    query = "UPDATE attempts SET state = ? WHERE number = ? AND state != ?"
    _run(connection, query, state.value, number, State.DROPPED.value)


def _attempt_state(connection: sqlite3.Connection, number: int, attempt: int) -> State:
    asked = (number, attempt)
    found = connection.execute("SELECT state FROM attempts WHERE number = ? AND attempt = ?", asked).fetchone()
    if found is None:
        raise TransitionRefused(f"attempt {attempt} of group {number} was never issued")
    return State(found[0])


def _check_attempt(connection: sqlite3.Connection, number: int, attempt: int, then: State) -> None:
    check_follows(f"attempt {attempt} of group {number}", _attempt_state(connection, number, attempt), then)


def _complete(connection: sqlite3.Connection, number: int) -> None:
    """A group none of whose attempts is still out is sampled."""
    asked = (number, State.ISSUED.value)
    out = connection.execute("SELECT 1 FROM attempts WHERE number = ? AND state = ?", asked).fetchone()
    (state,) = connection.execute("SELECT state FROM groups WHERE number = ?", (number,)).fetchone()
    if out is None and State(state) is State.ISSUED:
        _move(connection, number, State.SAMPLED)
