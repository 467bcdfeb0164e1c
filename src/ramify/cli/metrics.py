"""`ramify metrics RUN` and `ramify plot RUN...`: the metrics of running or ended runs, as text or as an image."""

import json
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ramify.cli.commands import DEFAULT_METRICS
from ramify.core.console import make_console
from ramify.core.errors import ConfigInvalid
from ramify.core.terminal import escape_controls
from ramify.launch.dashboard import render_sparkline
from ramify.run.lookup import find_run
from ramify.run.reader import read_metrics
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
        figure.savefig(path)
    except ValueError as error:
        raise ConfigInvalid(f"-o {path}: {error}") from error
    except OSError as error:
        raise ConfigInvalid(f"-o {path}: cannot be written: {error.strerror}") from error


def _plot_curve(axes: Any, points: Sequence[tuple[int, float]], *, label: str, color: str) -> None:
    """Plot one curve; if it has many points, a pale one below its smoothed version."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    if len(points) < SMOOTHING_THRESHOLD:
        axes.plot(steps, values, label=label, color=color, linewidth=1.6, marker="o", markersize=3)
        return
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1.0)
    axes.plot(steps, smooth(values), label=label, color=color, linewidth=1.8)


def smooth(values: Sequence[float], window: int = SMOOTHING_WINDOW) -> list[float]:
    """Return the centred moving average; the window shrinks at both ends, so that the curve is not shifted."""
    smoothed: list[float] = []
    for index in range(len(values)):
        radius = min(window // 2, index, len(values) - 1 - index)
        neighbours = values[index - radius : index + radius + 1]
        smoothed.append(sum(neighbours) / len(neighbours))
    return smoothed


CURVE_WIDTH = 24  # characters


def print_metrics(options: Namespace) -> int:
    """Print a summary of the metrics, or the points of those whose names match."""
    points = read_metrics(find_run(options.run), options.name or "*")
    if options.json:
        print(json.dumps([point._asdict() for point in points]))
    elif not points:
        missing = f"no metrics match {options.name!r} yet; 'ramify metrics {options.run}' lists all names"
        print(missing if options.name else "no metrics yet")
    elif options.all or options.name is not None:
        _print_points(points)
    else:
        _print_summary(points)
    return 0


def _print_points(points: Sequence[MetricPoint]) -> None:
    """Print one line for each point. A rich table would be slow: a long run has a hundred thousand points."""
    step_width = max(4, *(len(str(point.step)) for point in points))
    name_width = max(4, *(len(point.name) for point in points))
    print(f"{'step':<{step_width}}  {'name':<{name_width}}  value")
    for point in points:
        print(f"{point.step:<{step_width}}  {point.name:<{name_width}}  {point.value:.6g}")


def _print_summary(points: Sequence[MetricPoint]) -> None:
    """Print one line for each metric: number of points, first, last, minimum, maximum, and the curve."""
    values: dict[str, list[float]] = {}
    for point in points:  # sorted by step
        values.setdefault(point.name, []).append(point.value)
    table = Table("name", "points", "first", "last", "min", "max", "curve", box=None, padding=(0, 2, 0, 0))
    for name, numbers in sorted(values.items()):
        finite = [number for number in numbers if math.isfinite(number)] or [math.nan]
        extremes = (numbers[0], numbers[-1], min(finite), max(finite))
        curve = render_sparkline(finite, CURVE_WIDTH) if len(finite) > 1 else ""
        table.add_row(Text(name), str(len(numbers)), *(f"{number:.4g}" for number in extremes), Text(curve))
    console = make_console()
    console.width = max(console.width, 60 + max(map(len, values)) + CURVE_WIDTH)  # never truncate a name
    console.print(table)
    print("--name 'eval/*' prints the points of matching metrics, --all prints all points")


def plot(options: Namespace) -> int:
    """Plot the metrics whose names match."""
    if not Path(options.o).suffix:
        raise ConfigInvalid(f"-o {options.o}: the file needs a suffix: .png, .svg or .pdf")
    paths = {path.resolve(): path for path in map(find_run, options.run)}
    names_of_runs = [path.name for path in paths]
    runs = {
        path.name if names_of_runs.count(path.name) == 1 else str(relative_path): path
        for path, relative_path in paths.items()
    }
    names = options.name or list(DEFAULT_METRICS)
    points = {label: [point for name in names for point in read_metrics(path, name)] for label, path in runs.items()}
    if not any(points.values()):
        raise ConfigInvalid(f"nothing to plot: no run has {' or '.join(names)}")
    plot_metrics(points, Path(options.o))
    print(f"wrote {options.o}")
    return 0
