"""The report of an eval: scores with confidence intervals, and a summary of the rollouts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, median_high

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ramify.core.names import format_duration
from ramify.rollout.evals.progress import count_errors, count_tokens, group_rewards_by_task
from ramify.rollout.evals.rows import PHASES, total_seconds
from ramify.rollout.evals.stats import (
    Estimate,
    choose_ks,
    clustered_mean,
    estimate_pass_rates,
    mean_by_name,
    reward_bounds,
)
from ramify.run.store import RolloutRecord
from ramify.run.store.summary import REVISION_KEY, get_error_before_reply

MAX_FAILURES_SHOWN = 3  # distinct failures, and errors before the first reply, that are shown with their messages


def build_report(rows: Sequence[RolloutRecord], *, pass_threshold: float) -> RenderableType:
    """Return the scores with their intervals, and the summary. `pass_threshold` is the minimum reward that passes.

    A training run with several sources has scores for each of them; eval scores are from its last step.
    """
    rows_by_source = _split_by_source(rows)
    has_step = not rows_by_source.keys() <= {row.source for row in rows}
    source_column = ["source"] if len(rows_by_source) > 1 or has_step else []
    columns = [*source_column, "score", "mean", "95 % interval", "tasks"]
    scores = Table(*columns, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for source, source_rows in rows_by_source.items():
        for name, estimate in compute_scores(source_rows, pass_threshold=pass_threshold):
            cells = [name, f"{estimate.mean:.3f}", _format_interval(estimate), str(estimate.num_tasks)]
            scores.add_row(*[source for _ in source_column], *cells)
    summary = Table.grid(padding=(0, 2, 0, 0))
    for name, value in summarize_rollouts(rows):
        summary.add_row(name, value)
    if rows and not scores.row_count:
        scored = any(row.summary.get("rewards") for row in rows)
        head = Text("no score: " + ("no rollout has its rewards" if scored else "the taskset has no reward"))
        return Group(head, Text(), summary)
    return Group(scores, Text(), summary)


def compute_scores(rows: Sequence[RolloutRecord], *, pass_threshold: float) -> Iterator[tuple[str, Estimate]]:
    """Yield (name, estimate): avg@k, then pass@k and pass^k for every k up to the median number of rollouts
    per task.

    If tasks have different numbers of rollouts, as in a training run, the mean is named avg, without a k.
    """
    rewards = group_rewards_by_task(rows)
    mean = clustered_mean(rewards.values(), *reward_bounds(rows))
    if mean is None:
        return
    counts = [len(group) for group in rewards.values()]
    max_count, median_count = max(counts), median_high(counts)
    yield f"avg@{max_count}" if median_count == max_count else "avg", mean
    for k in choose_ks(max_count):
        pass_rates = estimate_pass_rates(rewards.values(), k, pass_threshold)
        if pass_rates is not None and k <= median_count:
            yield f"pass@{k}", pass_rates[0]
            if k > 1:
                yield f"pass^{k}", pass_rates[1]


def _split_by_source(rows: Sequence[RolloutRecord]) -> dict[str, list[RolloutRecord]]:
    """Return the rollouts of each source. Of an eval that ran at several steps, only the last step is included."""
    rows_by_source: dict[str, list[RolloutRecord]] = {}
    for row in rows:
        rows_by_source.setdefault(row.source, []).append(row)
    split: dict[str, list[RolloutRecord]] = {}
    for source, source_rows in rows_by_source.items():
        steps = [row.summary["step"] for row in source_rows if "step" in row.summary]
        if steps:
            last_step = max(steps)
            split[f"{source} at step {last_step}"] = [
                row for row in source_rows if row.summary.get("step") == last_step
            ]
        else:
            split[source] = source_rows
    return split


def summarize_rollouts(rows: Sequence[RolloutRecord]) -> Iterator[tuple[str, str]]:
    """Yield names and values: the taskset's rewards and metrics, truncation, tokens, errors and timing."""
    valid_rows = [row for row in rows if row.failure is None]
    yield "rollouts", f"{len(valid_rows)} counted, {len(rows) - len(valid_rows)} failed"
    if mixed := describe_mixed_revisions(rows):
        yield "revisions", f"{mixed}: the environment was changed between them"
    for table in ("rewards", "metrics"):
        for name, value in sorted(mean_by_name(row.summary.get(table, {}) for row in valid_rows).items()):
            yield name, f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.3f}"
    if valid_rows:
        yield "truncated", f"{sum(bool(row.summary.get('truncated')) for row in valid_rows) / len(valid_rows):.1%}"
        prompt_tokens, sampled_tokens = count_tokens(rows)
        yield "tokens", f"{prompt_tokens:,} in, {sampled_tokens:,} out"
    errors = count_errors(rows)
    yield "errors", ", ".join(f"{name} {count}" for name, count in errors.most_common()) or "none"
    named_rows = ((row.failure or get_error_before_reply(row.summary), row) for row in rows)
    failures = Counter((name, row.summary.get("message", "")) for name, row in named_rows if name is not None)
    for (name, message), count in failures.most_common(MAX_FAILURES_SHOWN):
        yield f"{count} × {name}", message
    if rows:
        times = {phase: fmean(row.summary.get("timing", {}).get(phase, 0.0) for row in rows) for phase in PHASES}
        timings = ", ".join(f"{phase} {value:.2f}s" for phase, value in times.items() if value >= 0.005)
        slowest = format_duration(max(map(total_seconds, rows)))
        yield "timing", f"{timings or 'nothing measurable'} (means; slowest rollout {slowest})"


def describe_mixed_revisions(rows: Sequence[RolloutRecord]) -> str:
    """Return how many rollouts came from which revision of the environment; "" if all came from one."""
    by_source: dict[str, Counter[int]] = {}
    for row in rows:
        by_source.setdefault(row.source, Counter())[row.summary.get(REVISION_KEY, 1)] += 1
    descriptions: list[str] = []
    for source, counts in by_source.items():
        if len(counts) > 1:
            parts = ", ".join(f"{counts[number]} of revision {number}" for number in sorted(counts))
            descriptions.append(f"{source}: {parts}" if source else parts)
    return "; ".join(descriptions)


def _format_interval(estimate: Estimate) -> str:
    interval = estimate.interval()
    return "one task: unknown" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
