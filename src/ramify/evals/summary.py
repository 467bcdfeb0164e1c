"""What is known about a finished rollout without opening its traces: the row of the index, and how to read it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.errors import Failure
from ramify.rollout import Environment, system_failure
from ramify.store import Row
from ramify.trace import Timing, Trace

PHASES = Timing.__struct_fields__


def rollout_id(task: str, repetition: int) -> str:
    """What a rollout is called: the same on every start, so that a second try takes the place of the first."""
    return f"{task}.{repetition}"


def row_of(environment: Environment, task: str, repetition: int, traces: Sequence[Trace]) -> Row:
    """The index row of a rollout. The first agent's reward is the rollout's."""
    failures = (system_failure(environment, trace) for trace in traces)
    failure = next((found for found in failures if found is not None), None)
    return Row(
        id=rollout_id(task, repetition),
        task=task,
        repetition=repetition,
        reward=traces[0].reward,
        failure=None if failure is None else failure.name,
        summary=_summary(traces, failure),
    )


def _summary(traces: Sequence[Trace], failure: Failure | None) -> dict[str, Any]:
    first = traces[0]
    calls = [node.call for trace in traces for node in trace.nodes if node.call is not None]
    return {
        "stop": first.stop,
        "truncated": any(trace.truncated for trace in traces),
        "calls": len(calls),
        "input": sum(call.usage.prompt for call in calls),
        "output": sum(call.usage.completion for call in calls),
        "rewards": {name: None if entry is None else entry[0] for name, entry in first.rewards.items()},
        "metrics": dict(first.metrics),
        "errors": dict(Counter(error.name for trace in traces for error in trace.errors)),
        "message": "" if failure is None else failure.message.strip().partition("\n")[0],
        "timing": msgspec.structs.asdict(first.timing),
    }


def seconds(row: Row) -> float:
    """How long the rollout took, all phases together; the harness's time holds the model's."""
    timing = row.summary.get("timing", {})
    return sum(float(timing.get(phase, 0.0)) for phase in PHASES if phase != "model")
