"""What training recorded of a rollout: its group, its attempt, the annotations of its tokens, the trainer's values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ramify.core.errors import DataCorrupt
from ramify.orchestrate.batches import BatchGroup, decode_batch
from ramify.run.store import Ledger, RunStore
from ramify.run.store.ledger_tables import AttemptRecord, GroupRecord
from ramify.trace import Annotation
from ramify.train.token_stats import TokenStats, list_token_stats, read_token_stats


@dataclass(frozen=True, slots=True, eq=False)
class GroupTraining:
    """A group, its attempts by index, and its part of a batch; None if it is in no batch.

    `trainer_incarnation` belongs to the trainer that committed the step or, before that, was last served it.
    """

    group: GroupRecord
    attempts: Mapping[int, AttemptRecord]
    batch_group: BatchGroup | None = None
    seq_len: int | None = None
    trainer_incarnation: int | None = None
    annotations: Mapping[tuple[str, int], list[Annotation]] = field(
        default_factory=dict[tuple[str, int], list[Annotation]]
    )

    def get_advantage(self, attempt_index: int) -> float | None:
        """Return the mean advantage of an attempt; None if it was not scored."""
        attempt = self.attempts.get(attempt_index)
        return None if attempt is None else attempt.notes.get("advantage")

    def list_dropped_attempts(self) -> list[dict[str, Any]]:
        """Return the attempts that have no rollout, with the reason."""
        return [
            {"attempt": index, "reason": attempt.reason.value if attempt.reason else None, "detail": attempt.detail}
            for index, attempt in sorted(self.attempts.items())
            if attempt.rollout_id is None
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the group as plain data."""
        group = self.group
        return {
            "number": group.number,
            "source": group.source,
            "task": group.task_number,
            "epoch": group.epoch,
            "size": group.size,
            "version": group.version,
            "incarnation": group.incarnation,
            "state": group.state.value,
            "step": group.step,
            "reason": group.reason.value if group.reason else None,
            "detail": group.detail,
        }


def find_attempt(store: RunStore, rollout_id: str) -> tuple[int, int] | None:
    """Return group number and attempt index of a rollout; None if it is not of a training source."""
    if not Ledger.exists_in(store):
        return None
    rows = store.select("SELECT number, attempt FROM attempts WHERE rollout = ?", (rollout_id,))
    return rows[0] if rows else None


def read_group_training(store: RunStore, group_number: int) -> GroupTraining:
    """Return what the ledger knows of a group. Raises KeyError if it was never issued."""
    ledger = Ledger.open_readonly(store)
    group = ledger.get_group(group_number)
    attempts = {attempt.attempt_index: attempt for attempt in ledger.attempts(group_number)}
    stored_batch = None if group.step is None else ledger.get_batch(group.step)
    if stored_batch is None:
        return GroupTraining(group, attempts)
    try:
        batch_groups, seq_len = decode_batch(stored_batch)
    except DataCorrupt:
        batch_groups, seq_len = [], None
    batch_group = next((entry for entry in batch_groups if entry.number == group_number), None)
    if batch_group is None:  # `ramify why --audit` reports it; the rollouts can still be read
        return GroupTraining(group, attempts)
    annotations: dict[tuple[str, int], list[Annotation]] = {}
    for annotation in batch_group.annotations:
        annotations.setdefault((annotation.trace_id, annotation.node), []).append(annotation)
    incarnation = ledger.get_step_trainer(stored_batch.step)
    return GroupTraining(group, attempts, batch_group, seq_len, incarnation, annotations)


@dataclass(frozen=True, slots=True)
class TokenStatsKey:
    """Identifies the trainer's values of one trace. `modified_ns` is the Unix time of their files' last change."""

    run: Path
    step: int
    incarnation: int
    trace_id: str
    modified_ns: int

    def read(self) -> TokenStats:
        """Return the values. Raises DataCorrupt if they cannot be read."""
        return read_token_stats(self.run, self.step, self.incarnation).select_trace(self.trace_id)


def find_token_stats(run: Path, training: GroupTraining, trace_id: str) -> TokenStatsKey | None:
    """Return the key of the trainer's values of a trace; None if the trainer recorded none for the group."""
    step, incarnation = training.group.step, training.trainer_incarnation
    if step is None or incarnation is None:
        return None
    try:
        times = [path.stat().st_mtime_ns for path in list_token_stats(run, step, incarnation)]
    except FileNotFoundError:  # a later trainer repeated the step and removed them
        return None
    return TokenStatsKey(run, step, incarnation, trace_id, max(times)) if times else None
