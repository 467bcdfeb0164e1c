"""The index row of a finished rollout: how it is built from the traces, and how it is read without them."""

from collections.abc import Sequence
from typing import Any

from ramify.rollout import Environment, find_system_failure
from ramify.run.store import RolloutRecord
from ramify.run.store.summary import REVISION_KEY, summarize_rollout
from ramify.trace import Timing, Trace

PHASES = Timing.__struct_fields__


def make_rollout_id(task_key: str, repetition: int) -> str:
    """Return a rollout's id. It is the same on every start, so a rerun replaces the stored rollout."""
    return f"{task_key}.{repetition}"


def build_row(
    environment: Environment, task_key: str, repetition: int, traces: Sequence[Trace], revision: int
) -> RolloutRecord:
    """Return the index row of a rollout, with the first agent's reward."""
    failure = next(filter(None, (find_system_failure(environment, trace) for trace in traces)), None)
    return RolloutRecord(
        id=make_rollout_id(task_key, repetition),
        task=task_key,
        repetition=repetition,
        reward=traces[0].reward,
        failure=None if failure is None else failure.name,
        summary={**summarize_rollout(traces, failure), REVISION_KEY: revision},
    )


def total_seconds(row: RolloutRecord) -> float:
    """Return the seconds of all phases. `harness` includes `model` and `stalled`, so these are not added."""
    timing = row.summary.get("timing", {})
    return sum(float(timing.get(phase, 0.0)) for phase in PHASES if phase not in ("model", "stalled"))


def flatten_row(row: RolloutRecord) -> dict[str, Any]:
    """Return a rollout as columns: rewards and metrics by name, counts and times."""
    summary = row.summary
    counts = {name: summary.get(name) for name in ("stop", "truncated", "calls", "input", "output")}
    return {
        "id": row.id,
        "task": row.task,
        "repetition": row.repetition,
        "reward": row.reward,
        "failure": row.failure,
        **{f"reward/{name}": value for name, value in summary.get("rewards", {}).items()},
        **{f"metric/{name}": value for name, value in summary.get("metrics", {}).items()},
        **counts,
        "seconds": total_seconds(row),
    }
