"""What is known about a finished rollout without opening its traces: the row of the index, and how to read it."""

from collections.abc import Sequence

from ramify.rollout import Environment, find_system_failure
from ramify.store import RolloutRecord
from ramify.store.summary import REVISION_KEY, summarize_rollout
from ramify.trace import Timing, Trace

PHASES = Timing.__struct_fields__


def make_rollout_id(task_key: str, repetition: int) -> str:
    """What a rollout is called: the same on every start, so that a second try takes the place of the first."""
    return f"{task_key}.{repetition}"


def build_row(
    environment: Environment, task_key: str, repetition: int, traces: Sequence[Trace], revision: int
) -> RolloutRecord:
    """The index row of a rollout. The first agent's reward is the rollout's."""
    failures = (find_system_failure(environment, trace) for trace in traces)
    failure = next((found for found in failures if found is not None), None)
    return RolloutRecord(
        id=make_rollout_id(task_key, repetition),
        task=task_key,
        repetition=repetition,
        reward=traces[0].reward,
        failure=None if failure is None else failure.name,
        summary={**summarize_rollout(traces, failure), REVISION_KEY: revision},
    )


def total_seconds(row: RolloutRecord) -> float:
    """How long the rollout took, all phases together; the harness's time holds the model's and the stalls."""
    timing = row.summary.get("timing", {})
    return sum(float(timing.get(phase, 0.0)) for phase in PHASES if phase not in ("model", "stalled"))
