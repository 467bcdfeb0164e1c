"""Curves of runs as a picture: one panel for each metric, one line for each run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ramify.errors import ConfigInvalid
from ramify.store.run_log import MetricPoint

COLORS = ("#1b6ca8", "#d1495b", "#3d8361", "#8d6a9f", "#edae49", "#4a5759")
SMOOTHING_WINDOW = 9  # steps that the bold line of a noisy curve averages over
SMOOTHING_THRESHOLD = 30  # points from which on there is one


def plot_metrics(runs: Mapping[str, Sequence[MetricPoint]], path: Path) -> None:
    """Draw the points of each run into `file`; its ending says which format."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigInvalid("plots need matplotlib: pip install 'ramify[plot]'") from error
    names = list(dict.fromkeys(point.name for points in runs.values() for point in points))
    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows), dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel, name in zip(panels, names):
        for number, (run, points) in enumerate(runs.items()):
            own = sorted((point.step, point.value) for point in points if point.name == name)
            if own:
                _plot_curve(panel, own, label=run, color=COLORS[number % len(COLORS)])
        panel.set_title(name, fontsize=10, loc="left")
        panel.set_xlabel("step", fontsize=9)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
        if len(runs) > 1:
            panel.legend(frameon=False, fontsize=8)
    for empty in list(figure.axes)[len(names) :]:
        empty.set_visible(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except ValueError as error:
        raise ConfigInvalid(f"-o {path}: {error}") from error
    except OSError as error:
        raise ConfigInvalid(f"-o {path}: cannot be written: {error.strerror}") from error


def _plot_curve(axes: object, points: Sequence[tuple[int, float]], *, label: str, color: str) -> None:
    """A line; where points are many and noisy, a pale one under its own mean."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    if len(points) < SMOOTHING_THRESHOLD:
        axes.plot(steps, values, label=label, color=color, linewidth=1.6, marker="o", markersize=3)  # pyright: ignore
        return
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1.0)  # pyright: ignore
    axes.plot(steps, smooth(values), label=label, color=color, linewidth=1.8)  # pyright: ignore


def smooth(values: Sequence[float], window: int = SMOOTHING_WINDOW) -> list[float]:
    """Each value as the mean of those around it, fewer at the ends, so that the curve is not shifted."""
    half = window // 2
    found: list[float] = []
    for at in range(len(values)):
        reach = min(half, at, len(values) - 1 - at)
        near = values[at - reach : at + reach + 1]
        found.append(sum(near) / len(near))
    return found
