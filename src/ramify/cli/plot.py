"""`ramify plot RUN [RUN...] -o FILE.png`: the metrics of one or more runs as an image."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ramify.cli.parser import CommandParser

DEFAULT_METRICS = ("reward/all/mean", "eval/*/avg")


def run(argv: Sequence[str]) -> int:
    """Plot the metrics whose names match."""
    options = _build_parser().parse_args(argv)
    from ramify.cli.run_lookup import find_run  # loaded here, not for help
    from ramify.core.errors import ConfigInvalid
    from ramify.launch.monitor.plot import plot_metrics
    from ramify.launch.run_queries import read_metrics

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


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser("plot")
    parser.add_run_argument(nargs="+")
    parser.add_argument("-o", metavar="FILE", required=True, help="image file to write: .png, .svg or .pdf")
    parser.add_argument(
        "--name", action="append", metavar="GLOB", help=f"metrics to plot (default: {' and '.join(DEFAULT_METRICS)})"
    )
    return parser
