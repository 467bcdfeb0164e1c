"""`ramify show RUN [ROLLOUT]`: the rollouts of a run, or one of them as a tree."""

import argparse
from collections.abc import Sequence

from rich.table import Table

from ramify.cli.parser import CommandParser


def run(args: Sequence[str]) -> int:
    """List the rollouts of a run, or print the traces of one."""
    asked = _parser().parse_args(args)
    from ramify.cli.runs import open_named, paper, pick  # loaded here, not for help
    from ramify.evals.report import report
    from ramify.evals.summary import seconds
    from ramify.evals.tree import tree_of

    console = paper()
    with open_named(asked.run) as store:
        if asked.rollout is not None:
            for trace in store.read(pick(store, asked.rollout).id):
                console.print(tree_of(trace, full=asked.full))
            return 0
        rows = store.rows()
        table = Table("rollout", "reward", "calls", "tokens out", "seconds", "end", box=None, padding=(0, 2, 0, 0))
        for row in rows:
            reward = "due" if row.reward is None else f"{row.reward:.3f}"
            counts = (str(row.summary.get(name, "")) for name in ("calls", "output"))
            table.add_row(row.id, reward, *counts, f"{seconds(row):.2f}", row.failure or row.summary.get("stop", ""))
        console.print(table)
        console.print(report(rows, threshold=asked.threshold))
    return 0


def _parser() -> argparse.ArgumentParser:
    from ramify.cli.app import COMMANDS

    parser = CommandParser(prog="ramify show", description=COMMANDS["show"].help)
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its name below outputs")
    parser.add_argument(
        "rollout", metavar="ROLLOUT", nargs="?", help="its id, or how it begins; without, all are listed"
    )
    parser.add_argument("--full", action="store_true", help="show every message to its end")
    parser.add_argument("--threshold", type=float, default=1.0, help="the reward from which a rollout passes")
    return parser
