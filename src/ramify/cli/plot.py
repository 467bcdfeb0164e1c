"""`ramify plot RUN [RUN...] -o FILE.png`: curves of one run, or of several beside each other."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ramify.cli.parser import CommandParser

DEFAULT_METRICS = ("reward/all/mean", "eval/*/avg")


def run(argv: Sequence[str]) -> int:
    """Draw the metrics whose names match."""
    options = _build_parser().parse_args(argv)
    from ramify.cli.run_lookup import find_run  # loaded here, not for help
    from ramify.errors import ConfigInvalid
    from ramify.launch.run_queries import read_metrics
    from ramify.monitor.plot import plot_metrics

    if not Path(options.o).suffix:
        raise ConfigInvalid(f"-o {options.o}: its ending says what kind of picture it is: .png, .svg or .pdf")
    paths = {path.resolve(): path for path in map(find_run, options.run)}
    labels = [path.name for path in paths]
    runs = {path.name if labels.count(path.name) == 1 else str(given): path for path, given in paths.items()}
    names = options.name or list(DEFAULT_METRICS)
    points = {label: [point for name in names for point in read_metrics(path, name)] for label, path in runs.items()}
    if not any(points.values()):
        raise ConfigInvalid(f"there is nothing to draw: no run has {' or '.join(names)}")
    plot_metrics(points, Path(options.o))
    print(f"drew {options.o}")
    return 0


def _build_parser() -> argparse.ArgumentParser:
    from ramify.cli.app import COMMANDS

    parser = CommandParser(prog="ramify plot", description=COMMANDS["plot"].help)
    parser.add_argument("run", metavar="RUN", nargs="+", help="a run's directory, or its name below outputs")
    parser.add_argument("-o", metavar="FILE", required=True, help="where the picture goes: .png, .svg or .pdf")
    parser.add_argument(
        "--name", action="append", metavar="GLOB", help=f"metrics to draw; without, {' and '.join(DEFAULT_METRICS)}"
    )
    return parser
