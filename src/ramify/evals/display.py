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

from ramify.evals.clock import clock
from ramify.evals.progress import Progress
from ramify.evals.stats import Estimate
from ramify.store import RolloutRecord

EVERY = 0.25  # seconds between two looks
LINE_EVERY = 5.0  # seconds between two log lines
SHOWN = 12  # running rollouts on the page


class Display(Protocol):
    """A front end. `look` is called often, `ended` once per rollout."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def say(self, line: str) -> None:
        """Something worth a line of its own."""
        ...

    def look(self, progress: Progress) -> None:
        """The state now."""
        ...

    def ended(self, row: RolloutRecord, progress: Progress) -> None:
        """A rollout is kept."""
        ...


def choose() -> Display:
    """The page where there is a terminal to draw it on, lines where there is none."""
    return Page() if sys.stdout.isatty() else Lines()


class Quiet:
    """Shows nothing: for programs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, line: str) -> None: ...

    def look(self, progress: Progress) -> None: ...

    def ended(self, row: RolloutRecord, progress: Progress) -> None: ...


class Lines(Quiet):
    """One line every few seconds, one at the end, and one for each rollout that the system failed."""

    def __init__(self) -> None:
        self._next = 0.0

    def say(self, line: str) -> None:
        print(line, flush=True)

    def look(self, progress: Progress) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY
            self.say(line_of(progress))

    def ended(self, row: RolloutRecord, progress: Progress) -> None:
        if row.failure is not None:
            self.say(f"rollout {row.id} failed: {row.failure}: {row.summary.get('message', '')}")
        if len(progress.rows) == progress.total:
            self.say(line_of(progress))


class Page(Quiet):
    """A page that is drawn anew several times a second."""

    def __init__(self) -> None:
        self._live = Live(console=Console(), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)

    def look(self, progress: Progress) -> None:
        self._live.update(page_of(progress), refresh=True)


def line_of(progress: Progress) -> str:
    """The state in one line of fields."""
    tokens_in, tokens_out = progress.tokens
    fields = {
        "done": f"{progress.done}/{progress.total}",
        "failed": progress.failed,
        "running": len(progress.running),
        "reward": spread(progress.reward),
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "tokens_per_s": f"{progress.rate:.0f}",
        "left": "unknown" if progress.left is None else clock(progress.left),
    }
    return f"{progress.title} " + " ".join(f"{name}={value}" for name, value in fields.items())


def page_of(progress: Progress) -> RenderableType:
    """The state as a page: bar, figures, metrics and errors, slowest, and what each running rollout does."""
    left = "" if progress.left is None else f"{clock(progress.left)} left"
    head = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=max(progress.total, 1), completed=len(progress.rows), width=40)
    head.add_row(Text(progress.title, style="bold"), bar, f"{len(progress.rows)}/{progress.total}", left)

    tokens_in, tokens_out = progress.tokens
    figures = _grid()
    figures.add_row("reward", spread(progress.reward))
    for name, value in sorted(progress.metrics.items()):
        figures.add_row(name, f"{value:.3f}")
    figures.add_row("tokens", f"{tokens_in:,} in, {tokens_out:,} out, {progress.rate:,.0f}/s")
    figures.add_row("elapsed", clock(progress.elapsed))
    for name, count in progress.errors.most_common():
        figures.add_row(Text(name, style="red"), str(count))

    slowest = _grid("slowest", "seconds", "")
    for id, seconds, state in progress.slowest:
        slowest.add_row(id, f"{seconds:.1f}", state)
    running = _grid("running", "seconds", "phase", "calls")
    for one in sorted(progress.running.values(), key=lambda one: one.started)[:SHOWN]:
        running.add_row(one.id, f"{one.seconds:.1f}", one.phase, str(one.calls))
    if len(progress.running) > SHOWN:
        running.add_row(f"and {len(progress.running) - SHOWN} more")
    return Group(head, Text(), figures, Text(), slowest, Text(), running)


def spread(estimate: Estimate | None) -> str:
    """A mean with its standard error."""
    if estimate is None:
        return "none"
    return f"{estimate.mean:.3f}" if estimate.error is None else f"{estimate.mean:.3f}±{estimate.error:.3f}"


def _grid(*titles: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    if titles:
        table.add_row(*(Text(title, style="dim") for title in titles))
    return table
