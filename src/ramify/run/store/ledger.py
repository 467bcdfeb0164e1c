"""The ledger: a durable record of every group that a run issued.

One idea: **decide, write, then act.** A batch is recorded before it is served, a group before it is dispatched, and a
step becomes part of the committed history in a single transaction (`commit_version`). After a crash the rows say what
was decided, and repeating it is idempotent. Version c is the result of steps 0 to c - 1; batch s is trained starting
from version s.
"""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Self

import msgspec

from ramify.core.errors import ConfigInvalid, OperationInvalid
from ramify.run.fencing.token import FencingToken, check_token
from ramify.run.store.group_state import DropReason, GroupState, check_transition
from ramify.run.store.index import RolloutRecord, make_damage_error
from ramify.run.store.ledger_tables import (
    LEDGER_TABLES,
    AttemptRecord,
    BatchRecord,
    CommitRecord,
    GroupRecord,
    LedgerProgress,
    TrainerRegistration,
)
from ramify.run.store.run_store import EpisodeData, RunStore, TableChange, decode_column
from ramify.trace import Trace

_GROUP_COLUMNS = "number, source, task, epoch, size, incarnation, version, state, step, reason, detail"
_ATTEMPT_COLUMNS = "number, attempt, tries, state, rollout, reason, detail, notes"
_BATCH_COLUMNS = "step, members, annotations, counts"
_NEXT_GROUP_QUERY = "SELECT coalesce(max(number) + 1, 0) FROM groups"  # counting them takes longer with every group
_OPEN_STATES = (GroupState.ISSUED.value, GroupState.SAMPLED.value, GroupState.SCORED.value)
EMPTY_NOTES = msgspec.msgpack.encode({})
MAX_DROP_REASONS = 5  # drop reasons listed by `describe_drops`


class Ledger:
    """The ledger's tables in `store`. A method that changes them returns when the change is durable.

    A group is identified by its number, an attempt by its group's number and its index in the group. A change that the
    state machine of `ramify.run.store.group_state` does not allow raises OperationInvalid and leaves the ledger
    unchanged.
    """

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.replicate: Callable[[], Awaitable[None]] | None = None
        """Copies the ledger to shared storage; a commit returns after it. None if the run has no shared directory."""

    @classmethod
    def open(cls, store: RunStore) -> Self:
        """Open the ledger of a writable run; create its tables if they are missing."""
        store.submit_change(_create_tables).result()
        return cls(store)

    @staticmethod
    def exists_in(store: RunStore) -> bool:
        """Return whether the store has the tables of a ledger, as every training run has."""
        return bool(store.select("SELECT 1 FROM sqlite_master WHERE name = 'groups'"))

    @classmethod
    def open_readonly(cls, store: RunStore) -> Self:
        """Open the ledger of a run for reading. Raises ConfigInvalid if the run is not a training run."""
        if not cls.exists_in(store):
            raise ConfigInvalid(f"{store.path} has no ledger: it is not a training run")
        return cls(store)

    # -- groups and attempts -------------------------------------------------------------------------------------

    async def declare_source(self, source: str, num_tasks: int | None) -> None:
        """Record a source and the number of tasks in one epoch of it; None if it has no epochs."""
        query = "INSERT OR REPLACE INTO sources VALUES (?, ?)"
        await self._submit_change(lambda connection: connection.execute(query, (source, num_tasks)))

    async def issue_groups(self, groups: Sequence[GroupRecord], states: Mapping[str, Any] | None = None) -> None:
        """Record groups before any attempt is dispatched, and save the `states` that choosing their tasks changed."""

        def apply(connection: sqlite3.Connection) -> None:
            (next_number,) = connection.execute(_NEXT_GROUP_QUERY).fetchone()
            issued = GroupState.ISSUED.value
            for number, group in enumerate(groups, next_number):
                if group.number != number:
                    raise OperationInvalid(f"group {group.number} cannot be issued: the next group is {number}")
                values = (group.source, group.task_number, group.epoch, group.size, group.incarnation, group.version)
                _insert(connection, "groups", group.number, *values, issued, None, None, "")
                query = "INSERT INTO attempts VALUES (?, ?, 1, ?, NULL, NULL, '', ?)"
                attempts = [(group.number, index, issued, EMPTY_NOTES) for index in range(group.size)]
                connection.executemany(query, attempts)
            _save_states(connection, states)

        await self._submit_change(apply)

    def queue_task_digest(self, source: str, task_number: int, digest: str) -> None:
        """Queue the content digest of an issued task; it becomes durable before any rollout of the task."""
        query = "INSERT OR IGNORE INTO tasks VALUES (?, ?, ?)"
        self.store.submit_change(lambda connection: connection.execute(query, (source, task_number, digest)))

    async def retry_attempt(self, group_number: int, attempt_index: int, failure: str) -> None:
        """Record that an attempt is run again, because a system failure ended it."""

        def apply(connection: sqlite3.Connection) -> None:
            state = _get_attempt_state(connection, (group_number, attempt_index))
            if state is not GroupState.ISSUED:
                raise OperationInvalid(
                    f"attempt {attempt_index} of group {group_number} is {state.value} and cannot be retried"
                )
            query = "UPDATE attempts SET tries = tries + 1, detail = ? WHERE number = ? AND attempt = ?"
            connection.execute(query, (failure, group_number, attempt_index))

        await self._submit_change(apply)

    async def record_sampled(
        self, group_number: int, attempt_index: int, record: RolloutRecord, traces: EpisodeData
    ) -> None:
        """Store the rollout of an attempt and mark the attempt as sampled, in one transaction."""
        key = (group_number, attempt_index)
        await self._submit_change(
            lambda connection: _end_attempt(connection, key, GroupState.SAMPLED, rollout=record.id), [(record, traces)]
        )

    async def drop_attempt(
        self,
        group_number: int,
        attempt_index: int,
        reason: DropReason,
        detail: str = "",
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Drop one attempt; its group goes on without it. `notes` has plain data about it."""
        key, encoded = (group_number, attempt_index), msgspec.msgpack.encode(dict(notes or {}))
        columns: dict[str, str | bytes] = {"reason": reason.value, "detail": detail, "notes": encoded}
        await self._submit_change(lambda connection: _end_attempt(connection, key, GroupState.DROPPED, **columns))

    async def record_scored(
        self,
        group_number: int,
        notes: Mapping[int, Mapping[str, Any]] | None = None,
        *,
        rollouts: Sequence[tuple[RolloutRecord, Sequence[Trace]]] = (),
        states: Mapping[str, Any] | None = None,
        reference_scores: bytes | None = None,
        algorithm_state_before: Mapping[str, Any] | None = None,
    ) -> None:
        """Record that a group has its rewards.

        `notes` has plain data about attempts by their index. `rollouts` replaces the rollouts that scoring changed.
        `reference_scores` are the encoded scores of another model, if one scored the group. `algorithm_state_before` is
        what the algorithm remembered of earlier groups when it scored this one; None if it has no state.
        """

        encoded_notes = [
            (msgspec.msgpack.encode(dict(attempt_notes)), group_number, index)
            for index, attempt_notes in (notes or {}).items()
        ]

        def apply(connection: sqlite3.Connection) -> None:
            _transition_group(connection, group_number, GroupState.SCORED)
            _transition_attempts(connection, group_number, GroupState.SCORED)
            query = "UPDATE attempts SET notes = ? WHERE number = ? AND attempt = ?"
            connection.executemany(query, encoded_notes)
            if reference_scores is not None:
                query = "INSERT OR REPLACE INTO reference_scores VALUES (?, ?)"
                connection.execute(query, (group_number, reference_scores))
            if algorithm_state_before is not None:
                encoded_state = msgspec.msgpack.encode(dict(algorithm_state_before))
                _insert(connection, "algorithm_states", group_number, encoded_state)
            _save_states(connection, states)

        await self._submit_change(apply, rollouts)

    async def drop_group(
        self, group_number: int, reason: DropReason, detail: str = "", *, states: Mapping[str, Any] | None = None
    ) -> None:
        """Drop a group and all its attempts: it will not be trained on."""

        def apply(connection: sqlite3.Connection) -> None:
            _transition_group(connection, group_number, GroupState.DROPPED)
            query = "UPDATE groups SET reason = ?, detail = ? WHERE number = ?"
            connection.execute(query, (reason.value, detail, group_number))
            dropped = GroupState.DROPPED.value
            query = "UPDATE attempts SET state = ?, reason = ?, detail = ? WHERE number = ? AND state != ?"
            connection.execute(query, (dropped, reason.value, detail, group_number, dropped))
            _delete_scoring_inputs(connection, group_number)
            _save_states(connection, states)

        await self._submit_change(apply)

    # -- batches and history -------------------------------------------------------------------------------------

    async def record_batch(self, batch: BatchRecord, states: Mapping[str, Any] | None = None) -> None:
        """Record a batch. It may be served once this returns, and never changes afterwards."""

        def apply(connection: sqlite3.Connection) -> None:
            (next_step,) = connection.execute("SELECT coalesce(max(step) + 1, 0) FROM batches").fetchone()
            if batch.step != next_step:
                raise OperationInvalid(f"batch {batch.step} cannot be recorded: the next batch is {next_step}")
            for number in batch.group_numbers:
                _transition_group(connection, number, GroupState.BATCHED)
                _transition_attempts(connection, number, GroupState.BATCHED)
                connection.execute("UPDATE groups SET step = ? WHERE number = ?", (batch.step, number))
                _delete_scoring_inputs(connection, number)
            members, counts = msgspec.msgpack.encode(batch.group_numbers), msgspec.msgpack.encode(batch.counts)
            _insert(connection, "batches", batch.step, members, batch.annotations, counts)
            _save_states(connection, states)

        await self._submit_change(apply)

    async def record_served(self, step: int, *, incarnation: int) -> None:
        """Record that the trainer of `incarnation` is about to receive the batch of `step`.

        This and the other methods that take an incarnation raise ProcessReplaced if it is not the newest one.
        """

        def apply(connection: sqlite3.Connection) -> None:
            _check_trainer(connection, incarnation)
            row = connection.execute("SELECT members FROM batches WHERE step = ?", (step,)).fetchone()
            if row is None:
                raise OperationInvalid(f"batch {step} cannot be served: it was never recorded")
            if step < _get_progress(connection, "committed"):
                raise OperationInvalid(f"batch {step} cannot be served: its step is already committed")
            connection.execute("INSERT OR IGNORE INTO served VALUES (?, ?, ?)", (incarnation, step, row[0]))

        await self._submit_change(apply)

    async def acknowledge_step(self, step: int, *, incarnation: int) -> None:
        """Record that the trainer has finished a step. Only `commit_version` makes it part of the history."""

        def apply(connection: sqlite3.Connection) -> None:
            _check_trainer(connection, incarnation)
            query = "SELECT 1 FROM served WHERE incarnation = ? AND step = ?"
            if not connection.execute(query, (incarnation, step)).fetchone():
                raise OperationInvalid(f"step {step} cannot be acknowledged: its batch was not served to this trainer")
            _set_progress(connection, "acknowledged", max(step + 1, _get_progress(connection, "acknowledged")))

        await self._submit_change(apply)

    async def commit_version(self, commit: CommitRecord) -> None:
        """Make the steps before a version part of the history; call it once the version's checkpoint is durable.

        A commit may be repeated. Raises OperationInvalid if the version was committed with another checkpoint, and
        ProcessReplaced if another head has taken over the run: then the commit does not count.
        """

        def apply(connection: sqlite3.Connection) -> None:
            _check_trainer(connection, commit.incarnation)
            committed, acknowledged = (_get_progress(connection, name) for name in ("committed", "acknowledged"))
            if not committed <= commit.version <= acknowledged:
                expected = f"expected {committed} to {acknowledged}"
                raise OperationInvalid(f"version {commit.version} cannot be committed: {expected}")
            existing = _get_commit(connection, commit.version)
            if existing is not None and existing != commit:
                trainer = FencingToken.from_number(existing.incarnation)
                problem = f"it was committed by trainer {trainer} with checkpoint {existing.directory}"
                raise OperationInvalid(f"version {commit.version} cannot be committed: {problem}")
            _set_commit(connection, commit)
            _move_steps(connection, GroupState.BATCHED, GroupState.TRAINED, "step < ?", commit.version)
            _set_progress(connection, "committed", commit.version)

        await self._submit_change(apply)
        if self.replicate is not None:
            await self.replicate()

    async def register_trainer(self) -> TrainerRegistration:
        """Register a new trainer. Unless it is the first, it has a new incarnation, and repeats uncommitted steps."""
        registrations: list[TrainerRegistration] = []

        def apply(connection: sqlite3.Connection) -> None:
            if is_replacement := bool(_get_progress(connection, "registered")):
                _begin_incarnation(connection)
            _set_progress(connection, "registered", 1)
            registrations.append(TrainerRegistration(_get_progress(connection, "incarnation"), is_replacement))

        await self._submit_change(apply)
        return registrations[-1]

    def begin_term(self, term: int) -> None:
        """Begin the term of a new head: its first trainer repeats the steps after the last committed version.

        It returns when the change is durable. In term 0 there was no head before, and nothing changes.
        """

        def apply(connection: sqlite3.Connection) -> None:
            _set_progress(connection, "incarnation", FencingToken(term).number)
            _set_progress(connection, "acknowledged", _get_progress(connection, "committed"))
            _set_progress(connection, "registered", 0)

        if term:
            self.store.submit_change(apply).result()

    async def roll_back(self, version: int, directory: str, *further_changes: TableChange) -> None:
        """End the history at an earlier version, because the checkpoint of the last one is lost.

        `directory` is the version's checkpoint, for a version whose commit is not recorded. Later batches stay as they
        were recorded and are served again, to a trainer with a new incarnation, so every group still counts once.
        `further_changes` are made in the same transaction.
        """

        def apply(connection: sqlite3.Connection) -> None:
            committed = _get_progress(connection, "committed")
            if not 0 <= version <= committed:
                raise OperationInvalid(f"the history cannot end at version {version}: expected 0 to {committed}")
            _move_steps(connection, GroupState.TRAINED, GroupState.BATCHED, "step >= ?", version)
            connection.execute("DELETE FROM commits WHERE version > ?", (version,))
            if version and _get_commit(connection, version) is None:
                _set_commit(connection, CommitRecord(version, 0, directory))
            _set_progress(connection, "committed", version)
            _begin_incarnation(connection)
            for change in further_changes:
                change(connection)

        await self._submit_change(apply)

    async def save_states(self, states: Mapping[str, Any]) -> None:
        """Store plain data by name, such as the state of a curriculum, for `load_states` after a restart."""
        await self._submit_change(lambda connection: _save_states(connection, states))

    # -- reading -------------------------------------------------------------------------------------------------

    def progress(self) -> LedgerProgress:
        """Return how far the run is."""
        values: dict[str, int] = dict(self.store.select("SELECT name, value FROM marks"))
        if unknown := values.keys() - {field.name for field in fields(LedgerProgress)}:
            raise make_damage_error(self.store.path, f"the names {sorted(unknown)} of `marks` cannot be decoded")
        return LedgerProgress(**values)

    def commits(self) -> list[CommitRecord]:
        """Return the commits that make up the history, oldest first."""
        return [CommitRecord(*row) for row in self.store.select("SELECT * FROM commits ORDER BY version")]

    def get_commit(self, version: int) -> CommitRecord | None:
        """Return the commit of a version; None if the version was not committed."""
        rows = self.store.select("SELECT * FROM commits WHERE version = ?", (version,))
        return CommitRecord(*rows[0]) if rows else None

    def load_states(self, prefix: str = "") -> dict[str, Any]:
        """Return the states whose names begin with `prefix`, by their names without it."""
        query = "SELECT name, value FROM states WHERE substr(name, 1, ?) = ?"
        return dict(
            self.store.select_records(
                lambda row: (row[0].removeprefix(prefix), msgspec.msgpack.decode(row[1])), query, (len(prefix), prefix)
            )
        )

    def get_reference_scores(self, group_number: int) -> bytes | None:
        """Return the encoded scores of another model for a scored group that is not in a batch; None without one."""
        rows = self.store.select("SELECT scores FROM reference_scores WHERE number = ?", (group_number,))
        return rows[0][0] if rows else None

    def get_algorithm_state_before(self, group_number: int) -> dict[str, Any] | None:
        """Return the algorithm's state before it scored a group that is not in a batch; None without a state."""
        query = "SELECT state FROM algorithm_states WHERE number = ?"
        states = self.store.select_records(decode_column, query, (group_number,))
        return states[0] if states else None

    def sources(self) -> dict[str, int | None]:
        """Return the number of tasks in one epoch of each declared source; None for a source without epochs."""
        return dict(self.store.select("SELECT name, tasks FROM sources"))

    def groups(self) -> list[GroupRecord]:
        """Return all groups in the order of issue."""
        return self._select_groups("1")

    def open_groups(self) -> list[GroupRecord]:
        """Return the groups that are neither in a batch nor dropped, in the order of issue."""
        return self._select_groups("state IN (?, ?, ?)", *_OPEN_STATES)

    def get_group(self, group_number: int) -> GroupRecord:
        """Return one group. Raises KeyError if it was never issued."""
        groups = self._select_groups("number = ?", group_number)
        if not groups:
            raise KeyError(group_number)
        return groups[0]

    def num_issued(self) -> int:
        """Return the number of issued groups, which is the number of the next one."""
        return self.store.select(_NEXT_GROUP_QUERY)[0][0]

    def count_by_state(self) -> dict[str, int]:
        """Return the number of groups in each state; trained ones are the rest, because a long run has very many."""
        states = [state.value for state in GroupState if state is not GroupState.TRAINED]
        query = f"SELECT state, count(*) FROM groups WHERE state IN ({', '.join('?' * len(states))}) GROUP BY state"
        counts: dict[str, int] = dict(self.store.select(query, states))
        num_trained = self.num_issued() - sum(counts.values())
        return counts | ({GroupState.TRAINED.value: num_trained} if num_trained else {})

    def count_ended_tries(self) -> dict[str, int]:
        """Return, by source, how many tries of attempts have ended."""
        query = (
            "SELECT source, sum(tries - (attempts.state = ?)) FROM attempts JOIN groups USING (number) GROUP BY source"
        )
        return dict(self.store.select(query, (GroupState.ISSUED.value,)))

    def describe_drops(self, limit: int = -1) -> str:
        """Return why groups were dropped, the most frequent reasons first; "" if none was.

        With a `limit`, only that many of the last dropped groups count.
        """
        inner = "SELECT * FROM groups WHERE state = ? ORDER BY number DESC LIMIT ?"
        query = f"SELECT reason, detail, count(*) FROM ({inner}) GROUP BY reason, detail"
        rows = self.store.select(f"{query} ORDER BY count(*) DESC, min(number)", (GroupState.DROPPED.value, limit))
        lines = [
            f"{count} × {reason or '?'}{detail and f': {detail}'}" for reason, detail, count in rows[:MAX_DROP_REASONS]
        ]
        if num_others := sum(count for _, _, count in rows[MAX_DROP_REASONS:]):
            lines.append(f"{num_others} for other reasons")
        return ", ".join(lines)

    def attempts(self, group_number: int | None = None) -> list[AttemptRecord]:
        """Return the attempts of one group, or of all groups."""
        where, values = ("", ()) if group_number is None else ("WHERE number = ?", (group_number,))
        query = f"SELECT {_ATTEMPT_COLUMNS} FROM attempts {where} ORDER BY number, attempt"
        return self.store.select_records(AttemptRecord.from_row, query, values)

    def batches(self, first_step: int = 0) -> list[BatchRecord]:
        """Return the batches from `first_step` on; those from `progress().committed` on are served to a new trainer."""
        query = f"SELECT {_BATCH_COLUMNS} FROM batches WHERE step >= ? ORDER BY step"
        return self.store.select_records(BatchRecord.from_row, query, (first_step,))

    def get_batch(self, step: int) -> BatchRecord | None:
        """Return the batch of a step; None if it was not recorded."""
        query = f"SELECT {_BATCH_COLUMNS} FROM batches WHERE step = ?"
        batches = self.store.select_records(BatchRecord.from_row, query, (step,))
        return batches[0] if batches else None

    def served_batches(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return (incarnation, step, group numbers) of every batch that was served to a trainer."""
        query = "SELECT incarnation, step, members FROM served ORDER BY step, incarnation"
        return self.store.select_records(lambda row: (row[0], row[1], tuple(msgspec.msgpack.decode(row[2]))), query)

    def get_step_trainer(self, step: int) -> int | None:
        """Return the incarnation whose training of a step counts; None if no trainer was served the step's batch.

        It is the one that committed the step, and before that, the last one that was served.
        """
        query = "SELECT incarnation FROM commits WHERE version > ? ORDER BY version LIMIT 1"
        rows = self.store.select(query, (step,))
        rows = rows or self.store.select("SELECT max(incarnation) FROM served WHERE step = ?", (step,))
        return rows[0][0]

    def _select_groups(self, condition: str, *values: Any) -> list[GroupRecord]:
        query = f"SELECT {_GROUP_COLUMNS} FROM groups WHERE {condition} ORDER BY number"
        return self.store.select_records(GroupRecord.from_row, query, values)

    async def _submit_change(
        self, apply: TableChange, rollouts: Sequence[tuple[RolloutRecord, EpisodeData]] = ()
    ) -> None:
        await asyncio.wrap_future(self.store.submit_change(apply, rollouts))


def _create_tables(connection: sqlite3.Connection) -> None:
    for statement in LEDGER_TABLES:
        connection.execute(statement)


def _insert(connection: sqlite3.Connection, table: str, *values: object) -> None:
    connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)


def _get_progress(connection: sqlite3.Connection, name: str) -> int:
    row = connection.execute("SELECT value FROM marks WHERE name = ?", (name,)).fetchone()
    return row[0] if row else 0


def _set_progress(connection: sqlite3.Connection, name: str, value: int) -> None:
    connection.execute("INSERT OR REPLACE INTO marks VALUES (?, ?)", (name, value))


def _check_trainer(connection: sqlite3.Connection, incarnation: int) -> None:
    """Raise ProcessReplaced if the trainer of `incarnation` was replaced."""
    newest = FencingToken.from_number(_get_progress(connection, "incarnation"))
    check_token("trainer", FencingToken.from_number(incarnation), newest)


def _begin_incarnation(connection: sqlite3.Connection) -> None:
    token = FencingToken.from_number(_get_progress(connection, "incarnation"))
    _set_progress(connection, "incarnation", token.next_incarnation().number)
    _set_progress(connection, "acknowledged", _get_progress(connection, "committed"))


def _get_commit(connection: sqlite3.Connection, version: int) -> CommitRecord | None:
    row = connection.execute("SELECT * FROM commits WHERE version = ?", (version,)).fetchone()
    return CommitRecord(*row) if row else None


def _set_commit(connection: sqlite3.Connection, commit: CommitRecord) -> None:
    values = (commit.version, commit.incarnation, commit.directory, commit.digest)
    connection.execute("INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?)", values)


def _save_states(connection: sqlite3.Connection, states: Mapping[str, Any] | None) -> None:
    for name, value in (states or {}).items():
        connection.execute("INSERT OR REPLACE INTO states VALUES (?, ?)", (name, msgspec.msgpack.encode(value)))


def _delete_scoring_inputs(connection: sqlite3.Connection, group_number: int) -> None:
    for table in ("reference_scores", "algorithm_states"):
        connection.execute(f"DELETE FROM {table} WHERE number = ?", (group_number,))


def _transition_group(connection: sqlite3.Connection, group_number: int, target: GroupState) -> None:
    row = connection.execute("SELECT state FROM groups WHERE number = ?", (group_number,)).fetchone()
    if row is None:
        raise OperationInvalid(f"group {group_number} was never issued and cannot become {target.value}")
    check_transition(f"group {group_number}", GroupState(row[0]), target)
    connection.execute("UPDATE groups SET state = ? WHERE number = ?", (target.value, group_number))


def _transition_attempts(connection: sqlite3.Connection, group_number: int, target: GroupState) -> None:
    """Move the attempts of a group to the state of the group, except those that were dropped."""
    query = "UPDATE attempts SET state = ? WHERE number = ? AND state != ?"
    connection.execute(query, (target.value, group_number, GroupState.DROPPED.value))


def _move_steps(connection: sqlite3.Connection, old: GroupState, new: GroupState, condition: str, version: int) -> None:
    """Move the groups in state `old` whose step meets the condition to state `new`, with their attempts."""
    groups = f"state = ? AND {condition}"
    query = f"UPDATE attempts SET state = ? WHERE state = ? AND number IN (SELECT number FROM groups WHERE {groups})"
    connection.execute(query, (new.value, old.value, old.value, version))
    connection.execute(f"UPDATE groups SET state = ? WHERE {groups}", (new.value, old.value, version))


def _get_attempt_state(connection: sqlite3.Connection, key: tuple[int, int]) -> GroupState:
    row = connection.execute("SELECT state FROM attempts WHERE number = ? AND attempt = ?", key).fetchone()
    if row is None:
        raise OperationInvalid(f"attempt {key[1]} of group {key[0]} was never issued")
    return GroupState(row[0])


def _end_attempt(
    connection: sqlite3.Connection, key: tuple[int, int], target: GroupState, **columns: str | bytes
) -> None:
    """Move an attempt to `target` and set `columns`; mark its group as sampled if no attempt of it is running."""
    group_number, attempt_index = key
    issued, columns = GroupState.ISSUED.value, {"state": target.value, **columns}
    assignments = ", ".join(f"{name} = ?" for name in columns)
    update = f"UPDATE attempts SET {assignments} WHERE number = ? AND attempt = ?"
    if not connection.execute(f"{update} AND state = ?", (*columns.values(), *key, issued)).rowcount:
        subject = f"attempt {attempt_index} of group {group_number}"
        check_transition(subject, _get_attempt_state(connection, key), target)
        connection.execute(update, (*columns.values(), *key))
    query = (
        "UPDATE groups SET state = ? WHERE number = ? AND state = ? "
        "AND NOT EXISTS (SELECT 1 FROM attempts WHERE attempts.number = ? AND attempts.state = ?)"
    )
    connection.execute(query, (GroupState.SAMPLED.value, group_number, issued, group_number, issued))
