"""The table at the end of an eval."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median_high

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ramify.evals.bounds import reward_bounds
from ramify.evals.clock import clock
from ramify.evals.progress import by_task, error_counts, means
from ramify.evals.stats import Estimate, clustered_mean, ladder, passes
from ramify.evals.summary import PHASES, seconds
from ramify.store import RolloutRecord
from ramify.store.summary import REVISION_KEY, UNRECORDED_REVISION

FAILURES = 3  # that are shown with their messages


def report(rows: Sequence[RolloutRecord], *, threshold: float) -> RenderableType:
    """Scores with their intervals, then what happened on the way."""
    scores = Table("score", "mean", "95 % interval", "tasks", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name, estimate in figures(rows, threshold=threshold):
        scores.add_row(name, f"{estimate.mean:.3f}", _interval(estimate), str(estimate.tasks))
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, value in _facts(rows):
        facts.add_row(name, value)
    if rows and not scores.row_count:
        scored = any(row.summary.get("rewards") for row in rows)
        head = Text("no score: " + ("no rollout has its rewards" if scored else "the taskset has no reward"))
        return Group(head, Text(), facts)
    return Group(scores, Text(), facts)


def figures(rows: Sequence[RolloutRecord], *, threshold: float) -> Iterator[tuple[str, Estimate]]:
    """Yield (name, estimate): avg@k, then pass@k and pass^k for each k that half of the tasks have rollouts for.

    A training run samples some tasks more often than others; its mean is then called avg, without a k.
    """
    rewards = by_task(rows)
    mean = clustered_mean(rewards.values(), *reward_bounds(rows))
    if mean is None:
        return
    counts = [len(group) for group in rewards.values()]
    most, half = max(counts), median_high(counts)
    yield f"avg@{most}" if half == most else "avg", mean
    for k in ladder(most):
        found = passes(rewards.values(), k, threshold)
        if found is not None and k <= half:
            yield f"pass@{k}", found[0]
            if k > 1:
                yield f"pass^{k}", found[1]


def _facts(rows: Sequence[RolloutRecord]) -> Iterator[tuple[str, str]]:
    counted = [row for row in rows if row.failure is None]
    yield "rollouts", f"{len(counted)} counted, {len(rows) - len(counted)} failed"
    if mixed := mixed_revisions(rows):
        yield "revisions", f"{mixed}: the environment was changed between them"
    for table in ("rewards", "metrics"):
        for name, value in sorted(means(rows, table).items()):
            yield name, f"{value:.3f}"
    if counted:
        yield "truncated", f"{sum(bool(row.summary.get('truncated')) for row in counted) / len(counted):.1%}"
        tokens = [sum(int(row.summary.get(name, 0)) for row in rows) for name in ("input", "output")]
        yield "tokens", f"{tokens[0]:,} in, {tokens[1]:,} out"
    errors = error_counts(rows)
    yield "errors", ", ".join(f"{name} {count}" for name, count in errors.most_common()) or "none"
    failures = Counter((row.failure, row.summary.get("message", "")) for row in rows if row.failure is not None)
    for (name, message), count in failures.most_common(FAILURES):
        yield f"{count} × {name}", message
    if rows:
        times = {phase: _mean([row.summary.get("timing", {}).get(phase, 0.0) for row in rows]) for phase in PHASES}
        told = ", ".join(f"{phase} {value:.2f}s" for phase, value in times.items() if value >= 0.005)
        yield "timing", f"{told or 'nothing measurable'} (means; slowest rollout {clock(max(map(seconds, rows)))})"


def mixed_revisions(rows: Sequence[RolloutRecord]) -> str:
    """Return how many rollouts came from which revision of the environment; "" if all came from one."""
    by_source: dict[str, Counter[int]] = {}
    for row in rows:
        by_source.setdefault(row.source, Counter())[row.summary.get(REVISION_KEY, UNRECORDED_REVISION)] += 1
    told: list[str] = []
    for source, counts in by_source.items():
        if len(counts) > 1:
            names = {
                number: "an unrecorded revision" if number == UNRECORDED_REVISION else f"revision {number}"
                for number in counts
            }
            parts = ", ".join(f"{counts[number]} of {names[number]}" for number in sorted(counts))
            told.append(f"{source}: {parts}" if source else parts)
    return "; ".join(told)


def _interval(estimate: Estimate) -> str:
    found = estimate.interval()
    return "one task: unknown" if found is None else f"{found[0]:.3f} to {found[1]:.3f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
