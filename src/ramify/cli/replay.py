"""`ramify replay RUN`: rescore an eval's saved rollouts with the current reward code."""

import argparse
import asyncio
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from rich.table import Table

from ramify.cli.parser import CommandParser
from ramify.core.names import format_count

if TYPE_CHECKING:
    from ramify.rollout.evals.replay import RescoredRollout


def run(argv: Sequence[str]) -> int:
    """Rescore an eval's rollouts and print the old and the new rewards."""
    options = _build_parser().parse_args(argv)
    from ramify.core.console import make_console  # loaded here, not for help

    rollouts = asyncio.run(_rescore(options.run))
    table = Table("rollout", "old reward", "new reward", "", box=None, padding=(0, 2, 0, 0))
    for rollout in rollouts:
        old, new = rollout.old_reward, rollout.new_reward
        if options.all or old != new or rollout.failure:
            table.add_row(rollout.id, _format_reward(old), _format_reward(new), rollout.failure or "")
    means = (
        _format_reward(fmean(rewards) if (rewards := [reward for reward in column if reward is not None]) else None)
        for column in zip(*((rollout.old_reward, rollout.new_reward) for rollout in rollouts))
    )
    table.add_row("mean", *means, format_count(len(rollouts), "rollout"))
    make_console().print(table)
    return 1 if all(rollout.failure for rollout in rollouts) else 0


async def _rescore(run_name: str) -> list["RescoredRollout"]:
    from ramify.cli.run_lookup import open_run_readonly
    from ramify.core.errors import ConfigInvalid
    from ramify.rollout.evals.replay import load_environment, rescore

    with open_run_readonly(run_name) as store:
        environment = load_environment(store)
        try:
            rollouts = [rollout async for rollout in rescore(store, environment)]
        finally:
            await environment.close()
        if not rollouts:
            raise ConfigInvalid(f"{store.path} has no rollout without a system failure")
        return rollouts


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser("replay")
    parser.add_run_argument()
    parser.add_argument("--all", action="store_true", help="also list rollouts whose reward did not change")
    return parser


def _format_reward(reward: float | None) -> str:
    return "missing" if reward is None else f"{reward:.3f}"
