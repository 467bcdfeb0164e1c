"""`ramify metrics RUN` and `ramify plot RUN...`: the metrics of running or ended runs, as text or as an image."""

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ramify.cli.commands import DEFAULT_METRICS
from ramify.cli.run_lookup import find_run
from ramify.core.console import make_console
from ramify.core.errors import ConfigInvalid
from ramify.launch.dashboard import render_sparkline
from ramify.launch.monitor.plot import plot_metrics
from ramify.run.reader import read_metrics
from ramify.run.store.run_log import MetricPoint

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
