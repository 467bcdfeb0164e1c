"""What the display of an SFT run shows: a live bar in a terminal, log lines elsewhere."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.progress_bar import ProgressBar

from ramify.core.display import Display, make_grid
from ramify.core.names import format_duration
from ramify.train.metrics import StepMetrics

LINE_INTERVAL = 5.0  # seconds between two lines
BAR_WIDTH = 40  # characters
EMA_DECAY = 0.9  # of the seconds per step


@dataclass(slots=True)
class StepProgress:
    """How many steps are done, how fast they are, and what the last one measured."""

    steps_done: int
    total_steps: int
    seconds_per_step: float | None = None  # an exponential moving average
    metrics: StepMetrics | None = None  # of the last finished step

    def record_step(self, metrics: StepMetrics) -> None:
        """Count a finished step."""
        self.steps_done += 1
        self.metrics = metrics
        average, seconds = self.seconds_per_step, metrics.seconds
        self.seconds_per_step = seconds if average is None else EMA_DECAY * average + (1 - EMA_DECAY) * seconds

    @property
    def details(self) -> str:
        """The metrics of the last step and the remaining time, such as `loss=1.2000 ... left=5m03s`."""
        eta = format_duration((self.seconds_per_step or 0.0) * (self.total_steps - self.steps_done))
        return f"{format_metrics(self.metrics)} left={eta}" if self.metrics is not None else f"left={eta}"


SftDisplay = Display[StepProgress]


class SftContent:
    """What an SFT run shows. A log gets one line every few seconds, and one for the last step."""

    def __init__(self) -> None:
        self._next_line_at = 0.0

    def format_lines(self, progress: StepProgress) -> Iterator[str]:
        """Yield the last step if it is due."""
        if time.monotonic() >= self._next_line_at or progress.steps_done == progress.total_steps:
            self._next_line_at = time.monotonic() + LINE_INTERVAL
            yield f"step={progress.steps_done}/{progress.total_steps} {progress.details}"

    def render_page(self, progress: StepProgress) -> RenderableType:
        """Return a progress bar with the metrics of the last step."""
        done, total = progress.steps_done, progress.total_steps
        bar, page = ProgressBar(total=total, completed=done, width=BAR_WIDTH), make_grid()
        page.add_row("sft", bar, f"{done}/{total}", progress.details)
        return page


def format_metrics(metrics: StepMetrics) -> str:
    """Format the metrics that people watch."""
    return (
        f"loss={metrics.loss:.4f} grad_norm={metrics.grad_norm:.3f} lr={metrics.lr:.2e} "
        f"tokens_per_s={metrics.tokens_per_second:.0f}"
    )
