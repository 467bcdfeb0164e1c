"""`ramify export RUN`: a run's rollouts (--to), or the adapter it trained (--adapter), for other tools."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ramify.cli.parser import CommandParser


def run(args: Sequence[str]) -> int:
    """Write the run's traces to one file, or its adapter to a directory."""
    asked = _parser().parse_args(args)
    if asked.adapter:
        return _export_adapter(asked.run, asked.file)
    from ramify.cli.runs import open_named  # loaded here, not for help
    from ramify.store import export, naming

    with open_named(asked.run) as store:
        path = asked.file or store.path / f"export.{asked.to}"
        with naming(path):
            count = export(store, asked.to, path)
    print(f"{count} traces in {path}")
    return 0


def _export_adapter(run: str, directory: Path | None) -> int:
    from ramify.cli.runs import open_named
    from ramify.store import naming
    from ramify.train.adapter import export_adapter  # loads torch

    with open_named(run) as store, naming(directory or store.path):
        step, directory = export_adapter(store, directory)
    print(
        f"adapter of step {step} in {directory}; load it with peft.PeftModel.from_pretrained(model, {str(directory)!r})"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    from ramify.cli.app import COMMANDS

    parser = CommandParser(prog="ramify export", description=COMMANDS["export"].help)
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its name below outputs")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", choices=("jsonl", "parquet"), help="the rollouts, in this form")
    what.add_argument("--adapter", action="store_true", help="the adapter of a LoRA run, as a directory for peft")
    parser.add_argument(
        "-o", dest="file", metavar="PATH", type=Path, help="by default export.FORM or adapter-STEP in the run"
    )
    return parser
