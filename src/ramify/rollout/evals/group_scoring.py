"""Group rewards: rewards that compare all repetitions of a task.

They run after the last rollout, over all valid traces of a task, including those of earlier starts. A group that has
grown is scored again.
"""

from collections.abc import MutableMapping, Sequence
from itertools import groupby

from ramify.rollout import Environment, score_group
from ramify.rollout.evals.plan import PlannedRollout
from ramify.rollout.evals.summary import build_row
from ramify.run.store import RolloutRecord, RunStore
from ramify.run.store.summary import REVISION_KEY


async def score_pending_groups(
    environment: Environment,
    store: RunStore,
    rollouts: Sequence[PlannedRollout],
    rows: MutableMapping[str, RolloutRecord],
) -> None:
    """Score every group that has a rollout without a reward, and replace its rows in `rows` and in the store."""
    if not environment.hooks.group_rewards:
        return
    for _, group in groupby(rollouts, key=lambda rollout: rollout.task_key):
        valid = [rollout for rollout in group if (row := rows.get(rollout.id)) is not None and row.failure is None]
        if all(rows[rollout.id].reward is not None for rollout in valid):
            continue
        episodes = [store.read_traces(rollout.id) for rollout in valid]
        await score_group(environment, valid[0].task, [traces[0] for traces in episodes])
        for rollout, traces in zip(valid, episodes, strict=True):
            revision = rows[rollout.id].summary[REVISION_KEY]
            row = build_row(environment, rollout.task_key, rollout.repetition, traces, revision)
            await store.add_rollout(row, traces)
            rows[rollout.id] = row
