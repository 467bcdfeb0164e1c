"""Progress of an SFT run on the terminal: a live bar, or log lines where there is no terminal."""

import sys
import time
from dataclasses import dataclass
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ramify.train.metrics import StepMetrics

LINE_INTERVAL = 5.0  # seconds between two lines
EMA_DECAY = 0.9  # of the seconds per step


@dataclass(slots=True)
class StepProgress:
    """How many steps are done, and how fast they are."""

    steps_done: int
    total_steps: int
    seconds_per_step: float | None = None
    """An exponential moving average."""

    def record_step(self, seconds: float) -> None:
        """Count a finished step that took `seconds`."""
        self.steps_done += 1
        average = self.seconds_per_step
        self.seconds_per_step = seconds if average is None else EMA_DECAY * average + (1 - EMA_DECAY) * seconds

    @property
    def eta(self) -> str:
        """The remaining time, such as `5m03s`."""
        seconds = round((self.seconds_per_step or 0.0) * (self.total_steps - self.steps_done))
        minutes, seconds = divmod(seconds, 60)
        if not minutes:
            return f"{seconds}s"
        return f"{minutes}m{seconds:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


class SftDisplay(Protocol):
    """Shows the progress of an SFT run. Used as a context manager around the run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def print_line(self, line: str) -> None:
        """Print a line of text."""
        ...

    def show_step(self, metrics: StepMetrics, progress: StepProgress) -> None:
        """Show a finished step."""
        ...


class NullSftDisplay:
    """Shows nothing: for programs, and for all ranks but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def print_line(self, line: str) -> None: ...

    def show_step(self, metrics: StepMetrics, progress: StepProgress) -> None: ...


class LogSftDisplay(NullSftDisplay):
    """Prints one line every few seconds, and one for the last step."""

    def __init__(self) -> None:
        self._next_line_at = 0.0

    def print_line(self, line: str) -> None:
        print(line, flush=True)

    def show_step(self, metrics: StepMetrics, progress: StepProgress) -> None:
        done, total = progress.steps_done, progress.total_steps
        if time.monotonic() >= self._next_line_at or done == total:
            self._next_line_at = time.monotonic() + LINE_INTERVAL
            self.print_line(f"step={done}/{total} {format_metrics(metrics)} left={progress.eta}")


class LiveSftDisplay(NullSftDisplay):
    """Draws a progress bar with the metrics of the last step."""

    def __init__(self) -> None:
        columns = (TextColumn("sft"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[metrics]}"))
        self._progress = Progress(*columns, console=Console())
        self._task = self._progress.add_task("sft", total=None, metrics="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def print_line(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def show_step(self, metrics: StepMetrics, progress: StepProgress) -> None:
        text = f"{format_metrics(metrics)} left={progress.eta}"
        self._progress.update(self._task, completed=progress.steps_done, total=progress.total_steps, metrics=text)


def format_metrics(metrics: StepMetrics) -> str:
    """Format the metrics that people watch."""
    return (
        f"loss={metrics.loss:.4f} grad_norm={metrics.grad_norm:.3f} lr={metrics.lr:.2e} "
        f"tokens_per_s={metrics.tokens_per_second:.0f}"
    )


def choose_display() -> SftDisplay:
    """Return the live display on a terminal, log lines elsewhere."""
    return LiveSftDisplay() if sys.stdout.isatty() else LogSftDisplay()
