"""How a training shows itself: a bar in a terminal, a line now and then everywhere else."""

import sys
import time
from dataclasses import dataclass
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ramify.train.metrics import StepMetrics

LINE_INTERVAL = 5.0  # seconds between two lines
EMA_DECAY = 0.9  # of the past in the seconds of a step


@dataclass(slots=True)
class StepProgress:
    """How far a run is, and how fast."""

    steps_done: int
    total_steps: int
    seconds_per_step: float | None = None  # of a step, smoothed

    def record_step(self, seconds: float) -> None:
        self.steps_done += 1
        self.seconds_per_step = (
            seconds if self.seconds_per_step is None else EMA_DECAY * self.seconds_per_step + (1 - EMA_DECAY) * seconds
        )

    @property
    def eta(self) -> str:
        """The time that is left, as people read it."""
        seconds = round((self.seconds_per_step or 0.0) * (self.total_steps - self.steps_done))
        minutes, rest = divmod(seconds, 60)
        if not minutes:
            return f"{rest}s"
        return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


class SftDisplay(Protocol):
    """A front end."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def print_line(self, line: str) -> None:
        """Something worth a line of its own."""
        ...

    def show_step(self, metrics: StepMetrics, progress: StepProgress) -> None:
        """A step is done."""
        ...


class NullSftDisplay:
    """Shows nothing: for programs, and for all ranks but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def print_line(self, line: str) -> None: ...

    def show_step(self, metrics: StepMetrics, progress: StepProgress) -> None: ...


class LogSftDisplay(NullSftDisplay):
    """One line every few seconds, and one for the last step."""

    def __init__(self) -> None:
        self._next_line_at = 0.0

    def print_line(self, line: str) -> None:
        print(line, flush=True)

    def show_step(self, metrics: StepMetrics, progress: StepProgress) -> None:
        if time.monotonic() >= self._next_line_at or progress.steps_done == progress.total_steps:
            self._next_line_at = time.monotonic() + LINE_INTERVAL
            self.print_line(
                f"step={progress.steps_done}/{progress.total_steps} {format_metrics(metrics)} left={progress.eta}"
            )


class LiveSftDisplay(NullSftDisplay):
    """A bar with the last step's figures behind it."""

    def __init__(self) -> None:
        columns = (TextColumn("sft"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
        self._progress = Progress(*columns, console=Console())
        self._task = self._progress.add_task("sft", total=None, figures="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def print_line(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def show_step(self, metrics: StepMetrics, progress: StepProgress) -> None:
        figures = f"{format_metrics(metrics)} left={progress.eta}"
        self._progress.update(self._task, completed=progress.steps_done, total=progress.total_steps, figures=figures)


def format_metrics(metrics: StepMetrics) -> str:
    """The figures people watch."""
    return (
        f"loss={metrics.loss:.4f} grad_norm={metrics.grad_norm:.3f} lr={metrics.lr:.2e} "
        f"tokens_per_s={metrics.tokens_per_second:.0f}"
    )


def choose_display() -> SftDisplay:
    """The bar where there is a terminal to draw it on, lines where there is none."""
    return LiveSftDisplay() if sys.stdout.isatty() else LogSftDisplay()
