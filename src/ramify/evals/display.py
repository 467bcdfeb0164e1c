"""The display of a running eval: a live page in a terminal, log lines elsewhere.

Displays only read the `EvalProgress`; the loop that runs the eval calls them.
"""

import sys
import time
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ramify.durations import format_duration
from ramify.evals.progress import EvalProgress
from ramify.evals.stats import Estimate
from ramify.store import RolloutRecord

REFRESH_INTERVAL = 0.25  # seconds
LOG_INTERVAL = 5.0  # seconds between log lines
MAX_RUNNING_SHOWN = 12


class EvalDisplay(Protocol):
    """A display. `refresh` is called every REFRESH_INTERVAL seconds, `on_rollout_finished` once per rollout."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def print_line(self, line: str) -> None:
        """Print one message."""
        ...

    def refresh(self, progress: EvalProgress) -> None:
        """Show the current progress."""
        ...

    def on_rollout_finished(self, row: RolloutRecord, progress: EvalProgress) -> None:
        """Show a rollout that has just been stored."""
        ...


def choose_display() -> EvalDisplay:
    """Return the live page if stdout is a terminal, else log lines."""
    return LiveEvalDisplay() if sys.stdout.isatty() else LogEvalDisplay()


class NullEvalDisplay:
    """A display that shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def print_line(self, line: str) -> None: ...

    def refresh(self, progress: EvalProgress) -> None: ...

    def on_rollout_finished(self, row: RolloutRecord, progress: EvalProgress) -> None: ...


class LogEvalDisplay(NullEvalDisplay):
    """Prints a line every LOG_INTERVAL seconds, one at the end, and one for each rollout with a system failure."""

    def __init__(self) -> None:
        self._next_log_time = 0.0

    def print_line(self, line: str) -> None:
        print(line, flush=True)

    def refresh(self, progress: EvalProgress) -> None:
        if time.monotonic() >= self._next_log_time:
            self._next_log_time = time.monotonic() + LOG_INTERVAL
            self.print_line(format_line(progress))

    def on_rollout_finished(self, row: RolloutRecord, progress: EvalProgress) -> None:
        if row.failure is not None:
            self.print_line(f"rollout {row.id} failed: {row.failure}: {row.summary.get('message', '')}")
        if len(progress.rows) == progress.total:
            self.print_line(format_line(progress))


class LiveEvalDisplay(NullEvalDisplay):
    """A live page in the terminal."""

    def __init__(self) -> None:
        self._live = Live(console=Console(), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def print_line(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)

    def refresh(self, progress: EvalProgress) -> None:
        self._live.update(render_page(progress), refresh=True)


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


def render_page(progress: EvalProgress) -> RenderableType:
    """Return the progress as a page: bar, rewards, metrics, errors, slowest and running rollouts."""
    remaining = "" if progress.remaining_seconds is None else f"{format_duration(progress.remaining_seconds)} left"
    head = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=max(progress.total, 1), completed=len(progress.rows), width=40)
    head.add_row(Text(progress.title, style="bold"), bar, f"{len(progress.rows)}/{progress.total}", remaining)

    tokens_in, tokens_out = progress.token_counts
    stats_table = _make_grid()
    stats_table.add_row("reward", format_estimate(progress.reward))
    for name, value in sorted(progress.metrics.items()):
        stats_table.add_row(name, f"{value:.3f}")
    stats_table.add_row("tokens", f"{tokens_in:,} in, {tokens_out:,} out, {progress.tokens_per_second:,.0f}/s")
    stats_table.add_row("elapsed", format_duration(progress.elapsed))
    for name, count in progress.error_counts.most_common():
        stats_table.add_row(Text(name, style="red"), str(count))

    slowest = _make_grid("slowest", "seconds", "")
    for id, seconds, state in progress.slowest:
        slowest.add_row(id, f"{seconds:.1f}", state)
    running = _make_grid("running", "seconds", "phase", "calls")
    for rollout in sorted(progress.running.values(), key=lambda rollout: rollout.started_at)[:MAX_RUNNING_SHOWN]:
        running.add_row(rollout.id, f"{rollout.elapsed:.1f}", rollout.phase, str(rollout.calls))
    if len(progress.running) > MAX_RUNNING_SHOWN:
        running.add_row(f"and {len(progress.running) - MAX_RUNNING_SHOWN} more")
    return Group(head, Text(), stats_table, Text(), slowest, Text(), running)


def format_estimate(estimate: Estimate | None) -> str:
    """Return a mean with its standard error."""
    if estimate is None:
        return "none"
    return f"{estimate.mean:.3f}" if estimate.stderr is None else f"{estimate.mean:.3f}±{estimate.stderr:.3f}"


def _make_grid(*titles: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    if titles:
        table.add_row(*(Text(title, style="dim") for title in titles))
    return table
