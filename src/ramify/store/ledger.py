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
from ramify.store.group_state import DropReason, GroupState, check_transition
from ramify.store.ledger_tables import LEDGER_TABLES, AttemptRecord, BatchRecord, GroupRecord, LedgerProgress
from ramify.store.rollout_table import RolloutRecord
from ramify.store.run_store import BLOCKING_CHANGE_TIMEOUT, EpisodeData, RunStore
from ramify.store.run_writer import ApplyChange
from ramify.trace import Trace

_GROUP_COLUMNS = "number, source, task, epoch, size, incarnation, version, state, step, reason, detail"
_ATTEMPT_COLUMNS = "number, attempt, tries, state, rollout, reason, detail, notes"
MAX_DROP_REASONS = 5  # for which groups were dropped that are told
_OPEN_STATES = (GroupState.ISSUED.value, GroupState.SAMPLED.value, GroupState.SCORED.value)


class Ledger:
    """The tables, behind the run's one writer. A method that changes them returns when the change is durable."""

    def __init__(self, store: RunStore) -> None:
        self.store = store

    @classmethod
    def open(cls, store: RunStore) -> Self:
        """The ledger of a run that is open to be written; its tables are made if they are not there."""
        store.submit_change(_create_tables).result(BLOCKING_CHANGE_TIMEOUT)
        return cls(store)

    @staticmethod
    def exists_in(store: RunStore) -> bool:
        """Return whether the store has the tables of a ledger, as every training run has."""
        return bool(store.select("SELECT 1 FROM sqlite_master WHERE name = 'groups'"))

    @classmethod
    def open_readonly(cls, store: RunStore) -> Self:
        """The ledger of a run that is open to be read. Raises ConfigInvalid if the run never trained."""
        if not cls.exists_in(store):
            raise ConfigInvalid(f"{store.path} has no ledger: it is no training run")
        return cls(store)

    # -- groups and attempts -------------------------------------------------------------------------------------

    async def declare_source(self, source: str, num_tasks: int | None) -> None:
        """A source, and how many tasks make an epoch of it (None: it has no epochs)."""
        await self._submit_change(
            lambda c, _: _execute(c, "INSERT OR REPLACE INTO sources VALUES (?, ?)", source, num_tasks)
        )

    async def issue_group(self, group: GroupRecord, states: Mapping[str, Any] | None = None) -> None:
        """A group before any of it is dispatched, together with what choosing it changed (`states`)."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            (count,) = connection.execute("SELECT count(*) FROM groups").fetchone()
            if group.number != count:
                raise TransitionRefused(f"group {group.number} cannot be issued: the next one is {count}")
            values = (group.source, group.task_number, group.epoch, group.size, group.incarnation, group.version)
            _execute(
                connection, _insert_sql("groups", 11), group.number, *values, GroupState.ISSUED.value, None, None, ""
            )
            for attempt in range(group.size):
                values = (group.number, attempt, 1, GroupState.ISSUED.value, None, None, "", EMPTY_NOTES)
                _execute(connection, _insert_sql("attempts", 8), *values)
            _save_states(connection, states)

        await self._submit_change(apply)

    def queue_task_digest(self, source: str, task_number: int, digest: str) -> None:
        """Queue the content digest of a task that was issued; it is durable before any rollout of the task is."""
        values = (source, task_number, digest)
        self.store.submit_change(lambda c, _: _execute(c, "INSERT OR IGNORE INTO tasks VALUES (?, ?, ?)", *values))

    async def retry_attempt(self, group_number: int, attempt_index: int, failure: str) -> None:
        """An attempt is run again, because what ended it was not the policy's doing."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            now = _get_attempt_state(connection, group_number, attempt_index)
            if now is not GroupState.ISSUED:
                raise TransitionRefused(
                    f"attempt {attempt_index} of group {group_number} is {now.value}: it cannot be run again"
                )
            where = "WHERE number = ? AND attempt = ?"
            _execute(
                connection,
                f"UPDATE attempts SET tries = tries + 1, detail = ? {where}",
                failure,
                group_number,
                attempt_index,
            )

        await self._submit_change(apply)

    async def record_sampled(
        self, group_number: int, attempt_index: int, record: RolloutRecord, traces: EpisodeData
    ) -> None:
        """An attempt's rollout is there: its traces and this fact become part of the run together."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            _check_attempt_transition(connection, group_number, attempt_index, GroupState.SAMPLED)
            query = "UPDATE attempts SET state = ?, rollout = ? WHERE number = ? AND attempt = ?"
            _execute(connection, query, GroupState.SAMPLED.value, record.id, group_number, attempt_index)
            _mark_sampled_if_complete(connection, group_number)

        await self._submit_change(apply, [(record, traces)])

    async def drop_attempt(self, group_number: int, attempt_index: int, reason: DropReason, detail: str = "") -> None:
        """An attempt leaves its group."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            _check_attempt_transition(connection, group_number, attempt_index, GroupState.DROPPED)
            query = "UPDATE attempts SET state = ?, reason = ?, detail = ? WHERE number = ? AND attempt = ?"
            _execute(connection, query, GroupState.DROPPED.value, reason.value, detail, group_number, attempt_index)
            _mark_sampled_if_complete(connection, group_number)

        await self._submit_change(apply)

    async def record_scored(
        self,
        group_number: int,
        notes: Mapping[int, Mapping[str, Any]] | None = None,
        *,
        rollouts: Sequence[tuple[RolloutRecord, Sequence[Trace]]] = (),
        states: Mapping[str, Any] | None = None,
    ) -> None:
        """A group has its rewards. `notes` is what was learnt about each attempt; `rollouts` those that changed."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            _transition_group(connection, group_number, GroupState.SCORED)
            _transition_attempts(connection, group_number, GroupState.SCORED)
            for attempt, each in (notes or {}).items():
                query = "UPDATE attempts SET notes = ? WHERE number = ? AND attempt = ?"
                _execute(connection, query, msgspec.msgpack.encode(dict(each)), group_number, attempt)
            _save_states(connection, states)

        await self._submit_change(apply, rollouts)

    async def drop_group(
        self, group_number: int, reason: DropReason, detail: str = "", *, states: Mapping[str, Any] | None = None
    ) -> None:
        """A group will not be trained on, for a reason."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            _transition_group(connection, group_number, GroupState.DROPPED)
            query = "UPDATE groups SET reason = ?, detail = ? WHERE number = ?"
            _execute(connection, query, reason.value, detail, group_number)
            query = "UPDATE attempts SET state = ?, reason = ?, detail = ? WHERE number = ? AND state != ?"
            _execute(
                connection,
                query,
                GroupState.DROPPED.value,
                reason.value,
                detail,
                group_number,
                GroupState.DROPPED.value,
            )
            _save_states(connection, states)

        await self._submit_change(apply)

    # -- batches and history -------------------------------------------------------------------------------------

    async def record_batch(self, batch: BatchRecord) -> None:
        """A batch is decided: it may be served once this returns, and will be the same for ever."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            (count,) = connection.execute("SELECT count(*) FROM batches").fetchone()
            if batch.step != count:
                raise TransitionRefused(f"batch {batch.step} cannot be cut: the next one is {count}")
            for number in batch.group_numbers:
                _transition_group(connection, number, GroupState.BATCHED)
                _transition_attempts(connection, number, GroupState.BATCHED)
                _execute(connection, "UPDATE groups SET step = ? WHERE number = ?", batch.step, number)
            members, counts = msgspec.msgpack.encode(batch.group_numbers), msgspec.msgpack.encode(batch.counts)
            _execute(connection, _insert_sql("batches", 4), batch.step, members, batch.annotations, counts)

        await self._submit_change(apply)

    async def record_served(self, step: int) -> None:
        """The trainer of this incarnation is about to be given a batch."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            found = connection.execute("SELECT members FROM batches WHERE step = ?", (step,)).fetchone()
            if found is None:
                raise TransitionRefused(f"batch {step} cannot be served: it was never cut")
            if step < _get_progress(connection, "committed"):
                raise TransitionRefused(f"batch {step} cannot be served: its step is part of the history")
            values = (_get_progress(connection, "incarnation"), step, found[0])
            _execute(connection, "INSERT OR IGNORE INTO served VALUES (?, ?, ?)", *values)

        await self._submit_change(apply)

    async def acknowledge_step(self, step: int) -> None:
        """The trainer has done a step. That is not yet history: only `commit` makes it so."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            asked = (_get_progress(connection, "incarnation"), step)
            if not connection.execute("SELECT 1 FROM served WHERE incarnation = ? AND step = ?", asked).fetchone():
                raise TransitionRefused(f"step {step} cannot be done: this trainer was never given its batch")
            _set_progress(connection, "acknowledged", max(step + 1, _get_progress(connection, "acknowledged")))

        await self._submit_change(apply)

    async def commit_version(self, version: int) -> None:
        """The checkpoint of `version` is safe: the steps that made it are history, and their groups trained."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            committed, done = _get_progress(connection, "committed"), _get_progress(connection, "acknowledged")
            if not committed <= version <= done:
                raise TransitionRefused(f"version {version} cannot be committed: between {committed} and {done} may be")
            trained, batched = GroupState.TRAINED.value, GroupState.BATCHED.value
            inside = "number IN (SELECT number FROM groups WHERE state = ? AND step < ?)"
            query = f"UPDATE attempts SET state = ? WHERE state = ? AND {inside}"
            _execute(connection, query, trained, batched, batched, version)
            _execute(connection, "UPDATE groups SET state = ? WHERE state = ? AND step < ?", trained, batched, version)
            _set_progress(connection, "committed", version)

        await self._submit_change(apply)

    async def begin_incarnation(self) -> LedgerProgress:
        """A trainer begins from the history: what was done after it is done again, by a new incarnation."""

        def apply(connection: sqlite3.Connection, _: object) -> None:
            _set_progress(connection, "incarnation", _get_progress(connection, "incarnation") + 1)
            _set_progress(connection, "acknowledged", _get_progress(connection, "committed"))

        await self._submit_change(apply)
        return self.progress()

    async def roll_back(self, version: int) -> None:
        """End the history at an earlier version, because the checkpoint of the last one is lost.

        Later batches stay as they were cut and are served again, to a trainer with a new incarnation, so every group is
        still counted once.
        """

        def apply(connection: sqlite3.Connection, _: object) -> None:
            committed = _get_progress(connection, "committed")
            if not 0 <= version <= committed:
                raise TransitionRefused(f"the history cannot end at version {version}: it ends at {committed}")
            trained, batched = GroupState.TRAINED.value, GroupState.BATCHED.value
            after = "number IN (SELECT number FROM groups WHERE state = ? AND step >= ?)"
            query = f"UPDATE attempts SET state = ? WHERE state = ? AND {after}"
            _execute(connection, query, batched, trained, trained, version)
            _execute(connection, "UPDATE groups SET state = ? WHERE state = ? AND step >= ?", batched, trained, version)
            _set_progress(connection, "committed", version)
            _set_progress(connection, "acknowledged", version)
            _set_progress(connection, "incarnation", _get_progress(connection, "incarnation") + 1)

        await self._submit_change(apply)

    async def save_states(self, states: Mapping[str, Any]) -> None:
        """What curricula and other parts want to find again, by name."""
        await self._submit_change(lambda connection, _: _save_states(connection, states))

    # -- reading -------------------------------------------------------------------------------------------------

    def progress(self) -> LedgerProgress:
        found: dict[str, int] = dict(self.store.select("SELECT name, value FROM marks"))
        return LedgerProgress(**found)

    def load_states(self, prefix: str = "") -> dict[str, Any]:
        """What is kept under names that begin with `prefix`, by the rest of the name."""
        query = "SELECT name, value FROM states WHERE substr(name, 1, ?) = ?"
        rows = self.store.select(query, (len(prefix), prefix))
        return {name.removeprefix(prefix): msgspec.msgpack.decode(value) for name, value in rows}

    def sources(self) -> dict[str, int | None]:
        """The declared sources and how many tasks make an epoch of each."""
        return dict(self.store.select("SELECT name, tasks FROM sources"))

    def groups(self) -> list[GroupRecord]:
        """All groups in the order of issue."""
        return [
            GroupRecord.from_row(row)
            for row in self.store.select(f"SELECT {_GROUP_COLUMNS} FROM groups ORDER BY number")
        ]

    def num_issued(self) -> int:
        """How many groups were issued."""
        return self.store.select("SELECT count(*) FROM groups")[0][0]

    def count_by_state(self) -> dict[str, int]:
        """How many groups are in each state."""
        return dict(self.store.select("SELECT state, count(*) FROM groups GROUP BY state"))

    def describe_drops(self, limit: int = -1) -> str:
        """Why groups were dropped, or the `last` of them, the most frequent reasons first; nothing if none was."""
        inner = "SELECT * FROM groups WHERE state = ? ORDER BY number DESC LIMIT ?"
        query = f"SELECT reason, detail, count(*) FROM ({inner}) GROUP BY reason, detail"
        rows = self.store.select(f"{query} ORDER BY count(*) DESC, min(number)", (GroupState.DROPPED.value, limit))
        told = [
            f"{count} × {reason or '?'}{detail and f': {detail}'}" for reason, detail, count in rows[:MAX_DROP_REASONS]
        ]
        rest = sum(count for _, _, count in rows[MAX_DROP_REASONS:])
        return ", ".join([*told, f"{rest} for other reasons"] if rest else told)

    def open_groups(self) -> list[GroupRecord]:
        """Groups that are in no batch yet and were not dropped, in the order of issue."""
        query = f"SELECT {_GROUP_COLUMNS} FROM groups WHERE state IN (?, ?, ?) ORDER BY number"
        return [GroupRecord.from_row(row) for row in self.store.select(query, _OPEN_STATES)]

    def get_group(self, group_number: int) -> GroupRecord:
        found = self.store.select(f"SELECT {_GROUP_COLUMNS} FROM groups WHERE number = ?", (group_number,))
        if not found:
            raise KeyError(group_number)
        return GroupRecord.from_row(found[0])

    def attempts(self, group_number: int | None = None) -> list[AttemptRecord]:
        """The attempts of a group, or of all."""
        where, values = ("", ()) if group_number is None else ("WHERE number = ?", (group_number,))
        query = f"SELECT {_ATTEMPT_COLUMNS} FROM attempts {where} ORDER BY number, attempt"
        return [AttemptRecord.from_row(row) for row in self.store.select(query, values)]

    def batches(self, first_step: int = 0) -> list[BatchRecord]:
        """The batches from step `first` on; those from `marks().committed` on are served to a trainer that begins."""
        query = "SELECT step, members, annotations, counts FROM batches WHERE step >= ? ORDER BY step"
        return [BatchRecord.from_row(row) for row in self.store.select(query, (first_step,))]

    def get_batch(self, step: int) -> BatchRecord | None:
        """The batch of a step; None if it was not cut."""
        query = "SELECT step, members, annotations, counts FROM batches WHERE step = ?"
        found = self.store.select(query, (step,))
        return BatchRecord.from_row(found[0]) if found else None

    def served_batches(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(incarnation, step, groups) of every batch a trainer was given."""
        rows = self.store.select("SELECT incarnation, step, members FROM served ORDER BY step, incarnation")
        return [(incarnation, step, tuple(msgspec.msgpack.decode(members))) for incarnation, step, members in rows]

    async def _submit_change(
        self, apply: ApplyChange, rollouts: Sequence[tuple[RolloutRecord, EpisodeData]] = ()
    ) -> None:
        await asyncio.wrap_future(self.store.submit_change(apply, rollouts))


EMPTY_NOTES = msgspec.msgpack.encode({})


def _create_tables(connection: sqlite3.Connection, _: object) -> None:
    for statement in LEDGER_TABLES:
        connection.execute(statement)


def _execute(connection: sqlite3.Connection, query: str, *values: object) -> None:
    connection.execute(query, values)


def _insert_sql(table: str, num_columns: int) -> str:
    return f"INSERT INTO {table} VALUES ({', '.join('?' * num_columns)})"


def _get_progress(connection: sqlite3.Connection, name: str) -> int:
    found = connection.execute("SELECT value FROM marks WHERE name = ?", (name,)).fetchone()
    return found[0] if found else 0


def _set_progress(connection: sqlite3.Connection, name: str, value: int) -> None:
    _execute(connection, "INSERT OR REPLACE INTO marks VALUES (?, ?)", name, value)


def _save_states(connection: sqlite3.Connection, states: Mapping[str, Any] | None) -> None:
    for name, value in (states or {}).items():
        _execute(connection, "INSERT OR REPLACE INTO states VALUES (?, ?)", name, msgspec.msgpack.encode(value))


def _transition_group(connection: sqlite3.Connection, group_number: int, target: GroupState) -> None:
    found = connection.execute("SELECT state FROM groups WHERE number = ?", (group_number,)).fetchone()
    if found is None:
        raise TransitionRefused(f"group {group_number} was never issued: it cannot become {target.value}")
    check_transition(f"group {group_number}", GroupState(found[0]), target)
    _execute(connection, "UPDATE groups SET state = ? WHERE number = ?", target.value, group_number)


def _transition_attempts(connection: sqlite3.Connection, group_number: int, target: GroupState) -> None:
    """The attempts of a group go where it goes; those that were dropped stay behind."""
    query = "UPDATE attempts SET state = ? WHERE number = ? AND state != ?"
    _execute(connection, query, target.value, group_number, GroupState.DROPPED.value)


def _get_attempt_state(connection: sqlite3.Connection, group_number: int, attempt_index: int) -> GroupState:
    asked = (group_number, attempt_index)
    found = connection.execute("SELECT state FROM attempts WHERE number = ? AND attempt = ?", asked).fetchone()
    if found is None:
        raise TransitionRefused(f"attempt {attempt_index} of group {group_number} was never issued")
    return GroupState(found[0])


def _check_attempt_transition(
    connection: sqlite3.Connection, group_number: int, attempt_index: int, target: GroupState
) -> None:
    check_transition(
        f"attempt {attempt_index} of group {group_number}",
        _get_attempt_state(connection, group_number, attempt_index),
        target,
    )


def _mark_sampled_if_complete(connection: sqlite3.Connection, group_number: int) -> None:
    """A group none of whose attempts is still out is sampled."""
    asked = (group_number, GroupState.ISSUED.value)
    out = connection.execute("SELECT 1 FROM attempts WHERE number = ? AND state = ?", asked).fetchone()
    (state,) = connection.execute("SELECT state FROM groups WHERE number = ?", (group_number,)).fetchone()
    if out is None and GroupState(state) is GroupState.ISSUED:
        _transition_group(connection, group_number, GroupState.SAMPLED)
