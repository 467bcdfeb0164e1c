"""Plot the metrics of runs: one panel for each metric, one curve for each run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ramify.core.errors import ConfigInvalid
from ramify.core.terminal import escape_controls
from ramify.run.store.run_log import MetricPoint

COLORS = ("#1b6ca8", "#d1495b", "#3d8361", "#8d6a9f", "#edae49", "#4a5759")
SMOOTHING_WINDOW = 9  # points that the smoothed curve averages over
SMOOTHING_THRESHOLD = 30  # points from which on a smoothed curve is drawn


def plot_metrics(runs: Mapping[str, Sequence[MetricPoint]], path: Path) -> None:
    """Plot the points of each run into the file `path`; its suffix selects the format. Raises ConfigInvalid."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigInvalid("plots need matplotlib: pip install 'ramify[plot]'") from error
    names = list(dict.fromkeys(point.name for points in runs.values() for point in points))
    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows), dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, name in zip(panels, names):
        for index, (run, metrics) in enumerate(runs.items()):
            points = sorted((metric.step, metric.value) for metric in metrics if metric.name == name)
            if points:
                _plot_curve(axes, points, label=run, color=COLORS[index % len(COLORS)])
        axes.set_title(escape_controls(name), fontsize=10, loc="left", parse_math=False)
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        if len(runs) > 1:
            axes.legend(frameon=False, fontsize=8)
    for unused in list(figure.axes)[len(names) :]:
        unused.set_visible(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)  # pyright: ignore[reportUnknownMemberType]
    except ValueError as error:
        raise ConfigInvalid(f"-o {path}: {error}") from error
    except OSError as error:
        raise ConfigInvalid(f"-o {path}: cannot be written: {error.strerror}") from error


def _plot_curve(axes: object, points: Sequence[tuple[int, float]], *, label: str, color: str) -> None:
    """Plot one curve; if it has many points, a pale one below its smoothed version."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    if len(points) < SMOOTHING_THRESHOLD:
        axes.plot(steps, values, label=label, color=color, linewidth=1.6, marker="o", markersize=3)  # pyright: ignore
        return
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1.0)  # pyright: ignore
    axes.plot(steps, smooth(values), label=label, color=color, linewidth=1.8)  # pyright: ignore


def smooth(values: Sequence[float], window: int = SMOOTHING_WINDOW) -> list[float]:
    """Return the centred moving average; the window shrinks at both ends, so that the curve is not shifted."""
    smoothed: list[float] = []
    for index in range(len(values)):
        radius = min(window // 2, index, len(values) - 1 - index)
        neighbours = values[index - radius : index + radius + 1]
        smoothed.append(sum(neighbours) / len(neighbours))
    return smoothed
