"""Rewards that only all repetitions of a task together can have.

They run when the last repetition is there, over every trace that counts, also those of an earlier start: a group that
has grown is judged anew.
"""

from collections.abc import MutableMapping, Sequence
from itertools import groupby

from ramify.evals.plan import PlannedRollout
from ramify.evals.summary import build_row
from ramify.rollout import Environment, score_group
from ramify.store import RolloutRecord, RunStore
from ramify.store.summary import REVISION_KEY, UNRECORDED_REVISION


async def score_pending_groups(
    environment: Environment,
    store: RunStore,
    rollouts: Sequence[PlannedRollout],
    rows: MutableMapping[str, RolloutRecord],
) -> None:
    """Judge every group in which a rollout still waits for it, and keep what was found in place of what was there."""
    if not environment.hooks.group_rewards:
        return
    for _, group in groupby(rollouts, key=lambda pair: pair.task_key):
        valid_rollouts = [pair for pair in group if (row := rows.get(pair.id)) is not None and row.failure is None]
        if any(rows[pair.id].reward is None for pair in valid_rollouts):
            episodes = [store.read_traces(pair.id) for pair in valid_rollouts]
            await score_group(environment, valid_rollouts[0].task, [traces[0] for traces in episodes])
            for pair, traces in zip(valid_rollouts, episodes, strict=True):
                revision = rows[pair.id].summary.get(REVISION_KEY, UNRECORDED_REVISION)
                row = build_row(environment, pair.task_key, pair.repetition, traces, revision)
                await store.add_rollout(row, traces)
                rows[pair.id] = row
