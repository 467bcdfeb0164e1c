"""What the display of a running eval shows: log lines and a live page of its `EvalProgress`, which is only read."""

import time
from collections.abc import Iterator
from itertools import islice

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from ramify.core.display import Display, make_grid
from ramify.core.names import format_duration
from ramify.rollout.evals.progress import EvalProgress, count_errors
from ramify.rollout.evals.stats import Estimate, mean_by_name

REFRESH_INTERVAL = 0.25  # seconds
LOG_INTERVAL = 5.0  # seconds between log lines
MAX_RUNNING_SHOWN = 12

EvalDisplay = Display[EvalProgress]


class EvalContent:
    """What an eval shows. A log gets a line every LOG_INTERVAL seconds, one at the end, and one per system failure."""

    def __init__(self) -> None:
        self._next_log_time = 0.0
        self._num_rows_shown = 0

    def format_lines(self, progress: EvalProgress) -> Iterator[str]:
        """Yield the failures since the last call, and the progress if it is due."""
        new_rows = list(islice(progress.rows.values(), self._num_rows_shown, None))
        self._num_rows_shown += len(new_rows)
        for row in new_rows:
            if row.failure is not None:
                yield f"rollout {row.id} failed: {row.failure}: {row.summary.get('message', '')}"
        is_last = bool(new_rows) and len(progress.rows) == progress.total
        if is_last or time.monotonic() >= self._next_log_time:
            self._next_log_time = time.monotonic() + LOG_INTERVAL
            yield format_line(progress)

    def render_page(self, progress: EvalProgress) -> RenderableType:
        """Return the progress as a page: bar, rewards, metrics, errors, slowest and running rollouts."""
        remaining = "" if progress.remaining_seconds is None else f"{format_duration(progress.remaining_seconds)} left"
        head = make_grid()
        bar = ProgressBar(total=max(progress.total, 1), completed=len(progress.rows), width=40)
        head.add_row(Text(progress.title, style="bold"), bar, f"{len(progress.rows)}/{progress.total}", remaining)

        tokens_in, tokens_out = progress.token_counts
        stats_table = make_grid()
        stats_table.add_row("reward", format_estimate(progress.reward))
        valid_rows = (row for row in progress.rows.values() if row.failure is None)
        for name, value in sorted(mean_by_name(row.summary.get("metrics", {}) for row in valid_rows).items()):
            stats_table.add_row(name, f"{value:.3f}")
        stats_table.add_row("tokens", f"{tokens_in:,} in, {tokens_out:,} out, {progress.tokens_per_second:,.0f}/s")
        stats_table.add_row("elapsed", format_duration(progress.elapsed))
        for name, count in count_errors(progress.rows.values()).most_common():
            stats_table.add_row(Text(name, style="red"), str(count))

        slowest = make_grid("slowest", "seconds", "")
        for id, seconds, state in progress.slowest:
            slowest.add_row(id, f"{seconds:.1f}", state)
        running = make_grid("running", "seconds", "phase", "calls")
        for rollout in sorted(progress.running.values(), key=lambda rollout: rollout.started_at)[:MAX_RUNNING_SHOWN]:
            running.add_row(rollout.id, f"{rollout.elapsed:.1f}", rollout.phase, str(rollout.calls))
        if len(progress.running) > MAX_RUNNING_SHOWN:
            running.add_row(f"and {len(progress.running) - MAX_RUNNING_SHOWN} more")
        return Group(head, Text(), stats_table, Text(), slowest, Text(), running)


def format_line(progress: EvalProgress) -> str:
    """Return the progress as one line of `name=value` fields."""
    tokens_in, tokens_out = progress.token_counts
    fields = {
        "done": f"{progress.num_completed}/{progress.total}",
        "failed": progress.num_failed,
        "running": len(progress.running),
        "reward": format_estimate(progress.reward),
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "tokens_per_s": f"{progress.tokens_per_second:.0f}",
        "left": "unknown" if progress.remaining_seconds is None else format_duration(progress.remaining_seconds),
    }
    return f"{progress.title} " + " ".join(f"{name}={value}" for name, value in fields.items())


def format_estimate(estimate: Estimate | None) -> str:
    """Return a mean with its standard error."""
    if estimate is None:
        return "none"
    return f"{estimate.mean:.3f}" if estimate.stderr is None else f"{estimate.mean:.3f}±{estimate.stderr:.3f}"
