"""`ramify replay RUN`: rescore an eval's saved rollouts with the current reward code."""

import asyncio
from argparse import Namespace
from statistics import fmean

from rich.table import Table

from ramify.cli.run_lookup import open_run_readonly
from ramify.core.console import make_console
from ramify.core.errors import ConfigInvalid
from ramify.core.names import format_count
from ramify.rollout.evals.replay import RescoredRollout, load_environment, rescore


def run(options: Namespace) -> int:
    """Rescore an eval's rollouts and print the old and the new rewards."""
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


async def _rescore(run_name: str) -> list[RescoredRollout]:
    with open_run_readonly(run_name) as store:
        environment = load_environment(store)
        try:
            rollouts = [rollout async for rollout in rescore(store, environment)]
        finally:
            await environment.close()
        if not rollouts:
            raise ConfigInvalid(f"{store.path} has no rollout without a system failure")
        return rollouts


def _format_reward(reward: float | None) -> str:
    return "missing" if reward is None else f"{reward:.3f}"
