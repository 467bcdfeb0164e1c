"""Reads rollouts and groups of a run, with what the ledger knows of them."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, cast

import msgspec

from ramify.errors import ConfigInvalid
from ramify.store import RolloutRecord, RunStore
from ramify.trace import Trace
from ramify.view.training_record import GroupTraining, find_attempt, read_group_training

MAX_ATTEMPTS = 64  # of a task of an eval that are shown as a group


def read_rollout(store: RunStore, id: str) -> tuple[RolloutRecord, Sequence[Trace], GroupTraining | None]:
    """Return a rollout, its traces, and what the ledger knows of its group. Raises ConfigInvalid if it is not there."""
    records = store.rollouts(id=id)
    if not records:
        raise ConfigInvalid(f"{store.path} has no rollout {id!r}")
    attempt = find_attempt(store, id)
    training = None if attempt is None else read_group_training(store, attempt[0])
    return records[0], store.read_traces(id), training


def list_other_attempts(
    store: RunStore, record: RolloutRecord, training: GroupTraining | None
) -> list[tuple[str, float]]:
    """Return the ids and rewards of the other scored attempts at the same task."""
    records = (
        store.rollouts(source=record.source, task=record.task)[:MAX_ATTEMPTS]
        if training is None
        else [entry for _, entry in _list_attempts(store, training)]
    )
    return [(other.id, other.reward) for other in records if other.id != record.id and other.reward is not None]


def get_trace(traces: Sequence[Trace], number: int) -> Trace:
    """Return a trace of a rollout. Raises ConfigInvalid if it has fewer."""
    if not 0 <= number < len(traces):
        raise ConfigInvalid(f"the rollout has no trace {number}; it has {len(traces)}")
    return traces[number]


def read_group(
    store: RunStore, group: int | None, source: str, task: str
) -> tuple[GroupTraining | None, list[RolloutRecord], list[float | None]]:
    """Return the ledger's entry of a group, its rollouts, and the advantage of each. Raises ConfigInvalid.

    An eval has no groups: the rollouts are those of one task, and the advantage is the reward minus their mean.
    """
    if group is None:
        records = store.rollouts(source=source, task=task)[:MAX_ATTEMPTS]
        rewards = [record.reward for record in records if record.reward is not None]
        mean = fmean(rewards) if rewards else 0.0
        return None, records, [None if record.reward is None else record.reward - mean for record in records]
    try:
        training = read_group_training(store, group)
    except KeyError:
        raise ConfigInvalid(f"{store.path} has no group {group}") from None
    attempts = _list_attempts(store, training)
    return training, [record for _, record in attempts], [training.get_advantage(index) for index, _ in attempts]


def _list_attempts(store: RunStore, training: GroupTraining) -> list[tuple[int, RolloutRecord]]:
    """Return the attempts of a group that have a rollout, by index."""
    ids = [(index, attempt.rollout_id) for index, attempt in sorted(training.attempts.items()) if attempt.rollout_id]
    records_by_id = {record.id: record for _, id in ids for record in store.rollouts(id=id)}
    return [(index, records_by_id[id]) for index, id in ids if id in records_by_id]


def add_training(store: RunStore, rows: list[dict[str, Any]]) -> None:
    """Add advantage, state and step to rows of the index, from the ledger."""
    groups = sorted({row["group_number"] for row in rows if row["group_number"] is not None})
    attempts: dict[tuple[int, int], tuple[Any, ...]] = {}
    if groups:
        marks = ", ".join("?" * len(groups))
        query = (
            "SELECT a.number, a.attempt, a.state, a.reason, a.notes, g.step FROM attempts a "
            f"JOIN groups g ON g.number = a.number WHERE a.number IN ({marks})"
        )
        attempts = {(number, attempt): tuple(rest) for number, attempt, *rest in store.select(query, groups)}
    for row in rows:
        state, reason, notes, step = attempts.get((row["group_number"], row["attempt"]), (None, None, b"\x80", None))
        advantage = cast(dict[str, Any], msgspec.msgpack.decode(notes)).get("advantage")
        row |= {"state": state, "reason": reason, "step": step, "advantage": advantage}
