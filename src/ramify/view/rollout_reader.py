"""Reads rollouts and groups of a run, with what the ledger knows of them."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.core.errors import ConfigInvalid
from ramify.run.store import RolloutRecord, RunStore
from ramify.trace import Trace
from ramify.trace.columns import common_prefix_length
from ramify.view.token_view import FloatArray
from ramify.view.training_record import GroupTraining, find_attempt, read_group_training

MAX_COMPARED_TOKENS = 5_000_000  # of all attempts together


def compute_reward_changes(
    trace: Trace, others: Sequence[tuple[Trace, float]], reward: float
) -> Mapping[int, FloatArray]:
    """Return the change of the expected reward at the tokens of each node.

    `others` are the other attempts with their rewards. The mean reward of the attempts that share the tokens up to one
    estimates what could be expected there. A large drop marks the token at which this rollout left the better attempts.
    """
    paths = [[branch.token_ids for branch in other.branches] for other, _ in others]
    num_tokens = sum(len(path) for attempt in paths for path in attempt)
    if not others or num_tokens > MAX_COMPARED_TOKENS:
        return {}
    rewards = np.array([reward, *(other_reward for _, other_reward in others)])
    changes: dict[int, FloatArray] = {}
    for branch in trace.branches:
        tokens = branch.token_ids
        shared = [max(common_prefix_length(tokens, path) for path in attempt) if attempt else 0 for attempt in paths]
        column = _compute_changes(np.array([len(tokens), *shared]), rewards, len(tokens))
        start = 0
        for node in branch.nodes:
            stop = start + len(node.token_ids)
            changes[node.index] = column[start:stop]
            start = stop
    return changes


def _compute_changes(shared: npt.NDArray[np.int64], rewards: FloatArray, length: int) -> FloatArray:
    """Return the change at each of `length` tokens; `shared` is how many of them each attempt has in common."""
    changes = np.zeros(length)
    for depth in np.unique(shared[shared < length]):
        changes[depth] = rewards[shared > depth].mean() - rewards[shared >= depth].mean()
    return changes


MAX_CONTEXT_CHARS = 300  # of a message in a list of replies that is not a reply
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

    An eval has no groups: the rollouts share one task, and the advantage is the reward minus their mean.
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


def add_scores(store: RunStore, rows: list[dict[str, Any]]) -> None:
    """Add the taskset's own rewards and metrics to rows of the index; a record that is damaged has none."""
    query = f"SELECT id, summary FROM rollouts WHERE id IN ({', '.join('?' * len(rows))})"
    summaries: dict[str, bytes] = dict(store.select(query, [row["id"] for row in rows]))
    for row in rows:
        try:
            summary = msgspec.msgpack.decode(summaries.get(row["id"], b"\x80"), type=dict[str, Any])
        except msgspec.MsgspecError:
            summary = {}
        row |= {"rewards": summary.get("rewards", {}), "metrics": summary.get("metrics", {})}


def list_messages(traces: Sequence[Trace], max_chars: int) -> list[dict[str, Any]]:
    """Return what followed the first user message of each trace, up to its last node: `max_chars` of text in all.

    Of messages that are not replies, such as results of tools, MAX_CONTEXT_CHARS are enough.
    """
    messages: list[dict[str, Any]] = []
    for trace in traces:
        path = [trace.nodes[-1]] if trace.nodes else []
        while path and path[0].parent >= 0:
            path.insert(0, trace.nodes[path[0].parent])
        first = next((at for at, node in enumerate(path) if node.message.role == "user"), -1)
        for message in (node.message for node in path[first + 1 :] if node.message.role != "system"):
            limit = max_chars if message.role == "assistant" else min(max_chars, MAX_CONTEXT_CHARS)
            text = message.text[: max(0, limit)]
            max_chars -= len(text)
            calls = [call.name for call in message.tool_calls]
            entry = {"agent": trace.agent, "role": message.role, "text": text, "calls": calls}
            messages.append({**entry, "is_cut": len(text) < len(message.text)})
    return messages


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
