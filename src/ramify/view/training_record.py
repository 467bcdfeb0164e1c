"""What training recorded of a rollout, and a check, token by token, that what was trained is what was sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.core.errors import DataCorrupt
from ramify.orchestrate.batches import BatchGroup, decode_batch, read_top_logprobs, rebuild_forests
from ramify.run.store import Ledger, RunStore
from ramify.run.store.ledger_tables import AttemptRecord, GroupRecord
from ramify.trace import Annotation, Forest, Trace
from ramify.train.token_stats import TokenStats, list_token_stats, read_token_stats


@dataclass(slots=True)
class TokenCheck:
    """How many batches and trained entries were compared, and what differs."""

    num_batches: int = 0
    num_entries: int = 0
    problems: list[str] = field(default_factory=list[str])


def check_trained_tokens(store: RunStore) -> TokenCheck:
    """Compare the entries of every batch of a run with the sampled tokens and logprobs of its stored traces.

    Raises DataCorrupt if a batch cannot be built from the traces any more, and ConfigInvalid without a ledger.
    """
    check = TokenCheck()
    traces: dict[str, Trace] = {}

    def read_traces(rollout_id: str) -> list[Trace]:
        rollout_traces = list(store.read_traces(rollout_id))
        traces.update({trace.id: trace for trace in rollout_traces})
        return rollout_traces

    for batch in Ledger.open_readonly(store).batches():
        traces.clear()
        for forest in rebuild_forests(batch, read_traces, lambda number: read_top_logprobs(store.path, number)):
            check.num_entries += len(forest.targets)
            check.problems += [f"step {batch.step}: {problem}" for problem in find_differing_calls(forest, traces)]
        check.num_batches += 1
    return check


def find_differing_calls(forest: Forest, traces: Mapping[str, Trace]) -> list[str]:
    """Return one line for each model call of which an entry is not what was sampled at its position."""
    problems: list[str] = []
    targets = forest.targets
    depths = _compute_depths(forest)[targets.token_index]
    is_on_policy = (targets.rl != 0) | (targets.ref_kl != 0) | (targets.kl != 0)  # others have only a cross entropy
    has_forest_token = forest.token_ids[targets.token_index] == targets.token
    bounds = np.searchsorted(targets.call, np.arange(len(forest.calls) + 1))
    for call, start, stop in zip(forest.calls, bounds, bounds[1:]):
        node = traces[forest.traces[call["trace"]]].nodes[int(call["node"])]
        entries = slice(int(start), int(stop))
        positions = depths[entries] - node.trace.graph.depth(node.index)
        on_policy = is_on_policy[entries]
        is_sampled = (
            has_forest_token[entries].all()
            and (np.diff(positions) > 0).all()
            and _has_values_at(node.token_ids, positions, targets.token[entries])
            and _has_values_at(
                node.logprobs, positions[on_policy] - node.sampled_span[0], targets.logprob[entries][on_policy]
            )
        )
        if not is_sampled:
            problems.append(f"node {node.index} of trace {node.trace.id}: its entries are not what was sampled there")
    return problems


def _compute_depths(forest: Forest) -> npt.NDArray[np.int64]:
    """Return for each token of the forest the number of tokens before it on its path."""
    segments = forest.segments
    return np.arange(forest.num_tokens) + np.repeat(segments["depth"] - segments["start"], segments["length"])


def _has_values_at(column: npt.NDArray[Any], positions: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> bool:
    """Return whether the column has these values at these positions; NaN equals nothing."""
    is_inside = (positions >= 0) & (positions < len(column))
    return bool(is_inside.all()) and np.array_equal(column[positions], values)


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
