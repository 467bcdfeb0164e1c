"""`ramify metrics RUN`: the metrics of a running or ended run: a summary line for each, or all points."""

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ramify.cli.parser import CommandParser

if TYPE_CHECKING:
    from ramify.run.store.run_log import MetricPoint

CURVE_WIDTH = 24  # characters


def run(argv: Sequence[str]) -> int:
    """Print a summary of the metrics, or the points of those whose names match."""
    options = _build_parser().parse_args(argv)
    from ramify.cli.run_lookup import find_run  # loaded here, not for help
    from ramify.launch.run_queries import read_metrics

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


def _print_points(points: Sequence["MetricPoint"]) -> None:
    """Print one line for each point. A rich table would be slow: a long run has a hundred thousand points."""
    step_width = max(4, *(len(str(point.step)) for point in points))
    name_width = max(4, *(len(point.name) for point in points))
    print(f"{'step':<{step_width}}  {'name':<{name_width}}  value")
    for point in points:
        print(f"{point.step:<{step_width}}  {point.name:<{name_width}}  {point.value:.6g}")


def _print_summary(points: Sequence["MetricPoint"]) -> None:
    """Print one line for each metric: number of points, first, last, minimum, maximum, and the curve."""
    from rich.table import Table
    from rich.text import Text

    from ramify.core.console import make_console
    from ramify.launch.dashboard import render_sparkline

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


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser("metrics")
    parser.add_run_argument()
    parser.add_argument(
        "--name", metavar="GLOB", help="print the points of metrics matching GLOB, such as 'eval/*/avg'"
    )
    parser.add_argument("--all", action="store_true", help="print all points instead of a summary")
    parser.add_argument("--json", action="store_true", help="print the points as a list of {step, name, value}")
    return parser
