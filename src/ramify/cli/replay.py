"""`ramify replay RUN`: what an eval's rollouts would score now."""

import argparse
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from ramify.cli.parser import CommandParser

if TYPE_CHECKING:
    from ramify.evals.replay import RescoredRollout


def run(args: Sequence[str]) -> int:
    """Score an eval's rollouts again and show old and new."""
    asked = _parser().parse_args(args)
    from ramify.cli.runs import paper  # loaded here, not for help

    found = asyncio.run(_rescored(asked.run))
    table = Table("rollout", "was", "is now", "", box=None, padding=(0, 2, 0, 0))
    for one in found:
        if asked.all or one.old_reward != one.new_reward or one.failure:
            table.add_row(one.id, _number(one.old_reward), _number(one.new_reward), one.failure or "")
    old, new = (
        [value for value in column if value is not None]
        for column in zip(*((f.old_reward, f.new_reward) for f in found))
    )
    table.add_row("mean", _number(_mean(old)), _number(_mean(new)), f"{len(found)} rollouts")
    paper().print(table)
    return 1 if all(one.failure for one in found) else 0


async def _rescored(name: str) -> list["RescoredRollout"]:
    from ramify.cli.runs import open_named
    from ramify.errors import ConfigInvalid
    from ramify.evals.replay import load_environment, rescore

    with open_named(name) as store:
        environment = load_environment(store)
        try:
            found = [one async for one in rescore(store, environment)]
        finally:
            await environment.close()
        if not found:
            raise ConfigInvalid(f"{store.path} has no rollouts that count")
        return found


def _parser() -> argparse.ArgumentParser:
    from ramify.cli.app import COMMANDS

    parser = CommandParser(prog="ramify replay", description=COMMANDS["replay"].help)
    parser.add_argument("run", metavar="RUN", help="the eval's directory, or its name below outputs")
    parser.add_argument("--all", action="store_true", help="show the rollouts whose reward is the same, too")
    return parser


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "due" if value is None else f"{value:.3f}"
