"""How a training shows itself: a bar in a terminal, a line now and then everywhere else."""

import sys
import time
from dataclasses import dataclass
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ramify.train.metrics import StepMetrics

LINE_EVERY = 5.0  # seconds between two lines
SMOOTH = 0.9  # of the past in the seconds of a step


@dataclass(slots=True)
class Pace:
    """How far a run is, and how fast."""

    done: int
    total: int
    seconds: float | None = None  # of a step, smoothed

    def add(self, seconds: float) -> None:
        self.done += 1
        self.seconds = seconds if self.seconds is None else SMOOTH * self.seconds + (1 - SMOOTH) * seconds

    @property
    def left(self) -> str:
        """The time that is left, as people read it."""
        seconds = round((self.seconds or 0.0) * (self.total - self.done))
        minutes, rest = divmod(seconds, 60)
        if not minutes:
            return f"{rest}s"
        return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


class Display(Protocol):
    """A front end."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def say(self, line: str) -> None:
        """Something worth a line of its own."""
        ...

    def step(self, metrics: StepMetrics, pace: Pace) -> None:
        """A step is done."""
        ...


class Quiet:
    """Shows nothing: for programs, and for all ranks but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, line: str) -> None: ...

    def step(self, metrics: StepMetrics, pace: Pace) -> None: ...


class Lines(Quiet):
    """One line every few seconds, and one for the last step."""

    def __init__(self) -> None:
        self._next = 0.0

    def say(self, line: str) -> None:
        print(line, flush=True)

    def step(self, metrics: StepMetrics, pace: Pace) -> None:
        if time.monotonic() >= self._next or pace.done == pace.total:
            self._next = time.monotonic() + LINE_EVERY
            self.say(f"step={pace.done}/{pace.total} {line_of(metrics)} left={pace.left}")


class Bar(Quiet):
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

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def step(self, metrics: StepMetrics, pace: Pace) -> None:
        figures = f"{line_of(metrics)} left={pace.left}"
        self._progress.update(self._task, completed=pace.done, total=pace.total, figures=figures)


def line_of(metrics: StepMetrics) -> str:
    """The figures people watch."""
    return (
        f"loss={metrics.loss:.4f} grad_norm={metrics.grad_norm:.3f} lr={metrics.lr:.2e} "
        f"tokens_per_s={metrics.tokens_per_second:.0f}"
    )


def choose() -> Display:
    """The bar where there is a terminal to draw it on, lines where there is none."""
    return Bar() if sys.stdout.isatty() else Lines()
