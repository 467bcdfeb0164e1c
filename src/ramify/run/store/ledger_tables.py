"""The SQL tables of the ledger, and one dataclass for each kind of row."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ramify.run.store.group_state import DropReason, GroupState

LEDGER_TABLES = (
    "CREATE TABLE IF NOT EXISTS marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS states (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS sources (name TEXT PRIMARY KEY, tasks INTEGER) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS groups (
        number INTEGER PRIMARY KEY,
        source TEXT NOT NULL, task INTEGER NOT NULL, epoch INTEGER NOT NULL, size INTEGER NOT NULL,
        incarnation INTEGER NOT NULL, version INTEGER NOT NULL,
        state TEXT NOT NULL, step INTEGER, reason TEXT, detail TEXT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state)",
    """CREATE TABLE IF NOT EXISTS attempts (
        number INTEGER NOT NULL, attempt INTEGER NOT NULL,
        tries INTEGER NOT NULL, state TEXT NOT NULL, rollout TEXT,
        reason TEXT, detail TEXT NOT NULL, notes BLOB NOT NULL,
        PRIMARY KEY (number, attempt)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS attempts_by_rollout ON attempts (rollout)",
    """CREATE TABLE IF NOT EXISTS batches (
        step INTEGER PRIMARY KEY, members BLOB NOT NULL, annotations BLOB NOT NULL, counts BLOB NOT NULL)""",
    # The scores of other models for groups that are scored but not in a batch yet; a batch holds its own.
    "CREATE TABLE IF NOT EXISTS reference_scores (number INTEGER PRIMARY KEY, scores BLOB NOT NULL)",
    # The algorithm's state before it scored these groups, so that it scores them in the same way after a restart.
    "CREATE TABLE IF NOT EXISTS algorithm_states (number INTEGER PRIMARY KEY, state BLOB NOT NULL)",
    """CREATE TABLE IF NOT EXISTS served (
        incarnation INTEGER NOT NULL, step INTEGER NOT NULL, members BLOB NOT NULL,
        PRIMARY KEY (incarnation, step)) WITHOUT ROWID""",
    # Which checkpoint each commit made the end of the history: its directory below `checkpoints`, and a digest.
    """CREATE TABLE IF NOT EXISTS commits (
        version INTEGER PRIMARY KEY, incarnation INTEGER NOT NULL, directory TEXT NOT NULL, digest TEXT NOT NULL)""",
    "CREATE TABLE IF NOT EXISTS metrics (step INTEGER NOT NULL, name TEXT NOT NULL, value REAL NOT NULL)",
    "CREATE INDEX IF NOT EXISTS metrics_by_name ON metrics (name, step)",
)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group of attempts at one task.

    `number` counts groups in the order of issue, from 0. `task_number` is the task's number in its source. The group
    was issued while the trainer of `incarnation` had published `version`. `step` is the step of its batch, if it is in
    one; `reason` and `detail` say why it was dropped.
    """

    number: int
    source: str
    task_number: int
    size: int
    epoch: int = 0
    incarnation: int = 0
    version: int = 0
    state: GroupState = GroupState.ISSUED
    step: int | None = None
    reason: DropReason | None = None
    detail: str = ""

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> "GroupRecord":
        """Return the group of a row of the table."""
        number, source, task, epoch, size, incarnation, version, state, step, reason, detail = row
        drop_reason = DropReason(reason) if reason else None
        return cls(
            number, source, task, size, epoch, incarnation, version, GroupState(state), step, drop_reason, detail
        )


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt of a group.

    `num_tries` is how often it was run, `rollout_id` the rollout it became. `detail` is the last system failure, or
    more about the drop `reason`. `notes` is plain data, such as the advantage or the name of the failure.
    """

    group_number: int
    attempt_index: int
    num_tries: int = 1
    state: GroupState = GroupState.ISSUED
    rollout_id: str | None = None
    reason: DropReason | None = None
    detail: str = ""
    notes: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> "AttemptRecord":
        """Return the attempt of a row of the table."""
        number, attempt, tries, state, rollout, reason, detail, notes = row
        drop_reason = DropReason(reason) if reason else None
        return cls(
            number, attempt, tries, GroupState(state), rollout, drop_reason, detail, msgspec.msgpack.decode(notes)
        )


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A recorded batch: its groups in order, the encoded annotations of their traces, and counts for metrics."""

    step: int
    group_numbers: tuple[int, ...]
    annotations: bytes
    counts: dict[str, int]

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> "BatchRecord":
        """Return the batch of a row of the table."""
        step, members, annotations, counts = row
        return cls(step, tuple(msgspec.msgpack.decode(members)), annotations, msgspec.msgpack.decode(counts))


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A commit: the trainer of `incarnation` made `version` the end of the history.

    `directory` is the name of the checkpoint, `digest` the SHA-256 of its manifest.
    """

    version: int
    incarnation: int
    directory: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class LedgerProgress:
    """How far the run is. The field names are stored in the table `marks`.

    `committed` is the number of steps in the history, `acknowledged` the number of steps the trainer has finished, and
    `incarnation` the number of the newest trainer's fencing token. `registered` is 1 once a trainer has registered.
    """

    committed: int = 0
    acknowledged: int = 0
    incarnation: int = 0
    registered: int = 0


@dataclass(frozen=True, slots=True)
class TrainerRegistration:
    """What a new trainer was given. `is_replacement` says whether another trainer had registered before."""

    incarnation: int
    is_replacement: bool
