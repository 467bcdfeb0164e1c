"""`ramify export RUN --to jsonl|parquet`: a run for other tools."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ramify.cli.parser import CommandParser


def run(args: Sequence[str]) -> int:
    """Write the run's traces to one file."""
    asked = _parser().parse_args(args)
    from ramify.cli.runs import open_named  # loaded here, not for help
    from ramify.store import export, naming

    with open_named(asked.run) as store:
        path = asked.file or store.path / f"export.{asked.to}"
        with naming(path):
            count = export(store, asked.to, path)
    print(f"{count} traces in {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    from ramify.cli.app import COMMANDS

    parser = CommandParser(prog="ramify export", description=COMMANDS["export"].help)
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its name below outputs")
    parser.add_argument("--to", choices=("jsonl", "parquet"), required=True, help="the form")
    parser.add_argument("-o", dest="file", metavar="FILE", type=Path, help="by default export.FORM in the run")
    return parser
