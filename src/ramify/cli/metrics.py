"""`ramify metrics RUN`: the numbers of a run, while it lives and afterwards."""

import argparse
import json
from collections.abc import Sequence

from ramify.cli.parser import CommandParser


def run(args: Sequence[str]) -> int:
    """Print the metrics whose names match."""
    asked = _parser().parse_args(args)
    from ramify.cli.runs import paper, run_path  # loaded here, not for help
    from ramify.launch.asking import metrics_of

    found = metrics_of(run_path(asked.run), asked.name)
    if asked.json:
        print(json.dumps([point._asdict() for point in found]))
        return 0
    from rich.table import Table
    from rich.text import Text

    table = Table("step", "name", "value", box=None, padding=(0, 2, 0, 0))
    for point in found:
        table.add_row(str(point.step), Text(point.name), f"{point.value:.6g}")
    paper().print(table if found else "no metrics of that name yet")
    return 0


def _parser() -> argparse.ArgumentParser:
    from ramify.cli.app import COMMANDS

    parser = CommandParser(prog="ramify metrics", description=COMMANDS["metrics"].help)
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its name below outputs")
    parser.add_argument("--name", default="*", metavar="GLOB", help="only names like this, such as 'eval/*/avg'")
    parser.add_argument("--json", action="store_true", help="a list of {step, name, value}")
    return parser
