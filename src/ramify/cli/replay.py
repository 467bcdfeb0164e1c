"""`ramify replay RUN`: what an eval's rollouts would score now."""

import argparse
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from ramify.cli.parser import CommandParser

if TYPE_CHECKING:
    from ramify.evals.replay import RescoredRollout


def run(argv: Sequence[str]) -> int:
    """Score an eval's rollouts again and show old and new."""
    options = _build_parser().parse_args(argv)
    from ramify.cli.run_lookup import make_console  # loaded here, not for help

    rescored = asyncio.run(_rescore(options.run))
    table = Table("rollout", "was", "is now", "", box=None, padding=(0, 2, 0, 0))
    for one in rescored:
        if options.all or one.old_reward != one.new_reward or one.failure:
            table.add_row(one.id, _format_reward(one.old_reward), _format_reward(one.new_reward), one.failure or "")
    old, new = (
        [value for value in column if value is not None]
        for column in zip(*((f.old_reward, f.new_reward) for f in rescored))
    )
    table.add_row(
        "mean", _format_reward(_compute_mean(old)), _format_reward(_compute_mean(new)), f"{len(rescored)} rollouts"
    )
    make_console().print(table)
    return 1 if all(one.failure for one in rescored) else 0


async def _rescore(run_name: str) -> list["RescoredRollout"]:
    from ramify.cli.run_lookup import open_run_readonly
    from ramify.errors import ConfigInvalid
    from ramify.evals.replay import load_environment, rescore

    with open_run_readonly(run_name) as store:
        environment = load_environment(store)
        try:
            rescored = [one async for one in rescore(store, environment)]
        finally:
            await environment.close()
        if not rescored:
            raise ConfigInvalid(f"{store.path} has no rollouts that count")
        return rescored


def _build_parser() -> argparse.ArgumentParser:
    from ramify.cli.app import COMMANDS

    parser = CommandParser(prog="ramify replay", description=COMMANDS["replay"].help)
    parser.add_argument("run", metavar="RUN", help="the eval's directory, or its name below outputs")
    parser.add_argument("--all", action="store_true", help="show the rollouts whose reward is the same, too")
    return parser


def _compute_mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _format_reward(value: float | None) -> str:
    return "due" if value is None else f"{value:.3f}"
