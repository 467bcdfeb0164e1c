"""How an eval shows itself while it runs: a live page in a terminal, log lines everywhere else.

One protocol, two front ends. Both read the same `Progress`; the loop that runs the eval tells them when to look.
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

REFRESH_INTERVAL = 0.25  # seconds between two looks
LOG_INTERVAL = 5.0  # seconds between two log lines
MAX_RUNNING_SHOWN = 12  # running rollouts on the page


class EvalDisplay(Protocol):
    """A front end. `look` is called often, `ended` once per rollout."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def print_line(self, line: str) -> None:
        """Something worth a line of its own."""
        ...

    def refresh(self, progress: EvalProgress) -> None:
        """The state now."""
        ...

    def on_rollout_finished(self, row: RolloutRecord, progress: EvalProgress) -> None:
        """A rollout is kept."""
        ...


def choose_display() -> EvalDisplay:
    """The page where there is a terminal to draw it on, lines where there is none."""
    return LiveEvalDisplay() if sys.stdout.isatty() else LogEvalDisplay()


class NullEvalDisplay:
    """Shows nothing: for programs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def print_line(self, line: str) -> None: ...

    def refresh(self, progress: EvalProgress) -> None: ...

    def on_rollout_finished(self, row: RolloutRecord, progress: EvalProgress) -> None: ...


class LogEvalDisplay(NullEvalDisplay):
    """One line every few seconds, one at the end, and one for each rollout that the system failed."""

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
    """A page that is drawn anew several times a second."""

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
    """The state in one line of fields."""
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
    """The state as a page: bar, figures, metrics and errors, slowest, and what each running rollout does."""
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
    for one in sorted(progress.running.values(), key=lambda one: one.started_at)[:MAX_RUNNING_SHOWN]:
        running.add_row(one.id, f"{one.elapsed:.1f}", one.phase, str(one.calls))
    if len(progress.running) > MAX_RUNNING_SHOWN:
        running.add_row(f"and {len(progress.running) - MAX_RUNNING_SHOWN} more")
    return Group(head, Text(), stats_table, Text(), slowest, Text(), running)


def format_estimate(estimate: Estimate | None) -> str:
    """A mean with its standard error."""
    if estimate is None:
        return "none"
    return f"{estimate.mean:.3f}" if estimate.stderr is None else f"{estimate.mean:.3f}±{estimate.stderr:.3f}"


def _make_grid(*titles: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    if titles:
        table.add_row(*(Text(title, style="dim") for title in titles))
    return table
