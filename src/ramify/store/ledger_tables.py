"""The tables of the ledger, and what their rows are called in code."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ramify.store.group_state import DropReason, GroupState

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
    """CREATE TABLE IF NOT EXISTS served (
        incarnation INTEGER NOT NULL, step INTEGER NOT NULL, members BLOB NOT NULL,
        PRIMARY KEY (incarnation, step)) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS metrics (step INTEGER NOT NULL, name TEXT NOT NULL, value REAL NOT NULL)",
    "CREATE INDEX IF NOT EXISTS metrics_by_name ON metrics (name, step)",
)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Attempts at one task. `number` is its place in the order of issue; (incarnation, version) the weights then."""

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
        number, source, task, epoch, size, incarnation, version, state, step, reason, detail = row
        why = DropReason(reason) if reason else None
        return cls(number, source, task, size, epoch, incarnation, version, GroupState(state), step, why, detail)


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt: how often it was run, the rollout it became, and what was learnt about that (`notes`)."""

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
        number, attempt, tries, state, rollout, reason, detail, notes = row
        why = DropReason(reason) if reason else None
        return cls(number, attempt, tries, GroupState(state), rollout, why, detail, msgspec.msgpack.decode(notes))


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch as it was decided: which groups in which order, and what the algorithms said about them."""

    step: int
    group_numbers: tuple[int, ...]
    annotations: bytes
    counts: dict[str, int]

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> "BatchRecord":
        step, members, annotations, counts = row
        return cls(step, tuple(msgspec.msgpack.decode(members)), annotations, msgspec.msgpack.decode(counts))


@dataclass(frozen=True, slots=True)
class LedgerProgress:
    """How far the run is: steps in the history, steps the trainer has done since, which trainer it is."""

    committed: int = 0
    acknowledged: int = 0
    incarnation: int = 0
