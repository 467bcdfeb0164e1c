"""reverse-text as our taskset, as an environment of v0 and as a taskset of v1: `tiny` learns the same from each.

The rewards of the first and of the last rollouts of the three runs must agree within their intervals, clustered by
group.
"""

from itertools import combinations
from pathlib import Path
from typing import Any

from ramify.rollout.evals.stats import Estimate, clustered_mean
from ramify.trace import Trace
from tests.env.adapters.training import train
from tests.env.adapters.verifiers_checks import make_importable

NUM_STEPS = 20
NUM_COMPARED = 64  # rollouts at each end of a run


def check(pythons: dict[str, Path], output: Path) -> None:
    """Train all three, and compare; `pythons` are the interpreters of both generations."""
    sources: dict[str, dict[str, Any]] = {
        "ours": {"taskset": {"id": "reverse-text"}},
        "v0": {"taskset": {"id": "verifiers", "env": "reverse_text_v0"}, "python": str(pythons["verifiers-v0"])},
        "v1": {
            "taskset": {"id": "verifiers", "env": "reverse-text-v1", "agent": {"harness": {"id": "null"}}},
            "python": str(pythons["verifiers"]),
        },
    }
    curves: dict[str, tuple[Estimate, Estimate]] = {}
    for name, source in sources.items():
        make_importable("verifiers_v0" if name == "v0" else "verifiers_v1")
        traces = train(output, name, source, steps=NUM_STEPS)
        curves[name] = (estimate(traces[:NUM_COMPARED]), estimate(traces[-NUM_COMPARED:]))
        first, last = (f"{end.mean:.3f} {end.interval()}" for end in curves[name])
        print(f"   {name}: {NUM_STEPS} steps, reward at first {first}, at last {last}", flush=True)
    for one, other in combinations(curves, 2):
        for end in (0, 1):
            assert overlap(curves[one][end], curves[other][end]), (one, other, end, curves)


def estimate(traces: list[Trace]) -> Estimate:
    groups: dict[str, list[float]] = {}
    for trace in traces:
        if trace.reward is not None:
            groups.setdefault(trace.group, []).append(trace.reward)
    mean = clustered_mean(groups.values(), 0.0, 1.0)
    assert mean is not None
    return mean


def overlap(one: Estimate, other: Estimate) -> bool:
    first, second = one.interval(), other.interval()
    assert first is not None and second is not None
    return first[0] <= second[1] and second[0] <= first[1]
