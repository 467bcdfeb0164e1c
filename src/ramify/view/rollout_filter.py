"""Which rollouts the table of the page lists, as a condition for the index of rollouts."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Which rollouts to list. `error` is the name of a failure or an error; "any" is every rollout with one.

    `state` is a state of the ledger, such as `dropped`; `text` are words that all occur in the messages.
    """

    source: str | None = None
    step: int | None = None
    group: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    stop: str | None = None
    error: str | None = None
    state: str | None = None
    text: str | None = None


def build_condition(rollout_filter: RolloutFilter) -> tuple[str, list[Any]]:
    """Return the SQL condition of a filter for the tables of the index, and its values."""
    conditions: list[tuple[str, Any]] = [
        ("source = ?", rollout_filter.source),
        ("group_number IN (SELECT number FROM run.groups WHERE step = ?)", rollout_filter.step),
        ("group_number = ?", rollout_filter.group),
        ("reward >= ?", rollout_filter.min_reward),
        ("reward <= ?", rollout_filter.max_reward),
        ("stop = ?", rollout_filter.stop),
        ("group_number IN (SELECT number FROM run.groups WHERE state = ?)", rollout_filter.state),
        ("number IN (SELECT rowid FROM texts WHERE texts MATCH ?)", _build_match(rollout_filter.text)),
    ]
    conditions = [(sql, value) for sql, value in conditions if value is not None]
    if rollout_filter.error == "any":
        conditions.append(("errors != ?", ""))
    elif rollout_filter.error:
        conditions.append(("instr(' ' || errors || ' ', ?)", f" {rollout_filter.error} "))
    return " AND ".join(sql for sql, _ in conditions) or "1", [value for _, value in conditions]


def _build_match(text: str | None) -> str | None:
    """Return a full-text query for all words of a text; the last one may be the beginning of a word."""
    text = (text or "").replace("\0", " ")  # where SQLite would end the text
    words = [word.replace('"', '""') for word in text.split()]
    return " ".join(f'"{word}"' for word in words) + "*" if words else None
