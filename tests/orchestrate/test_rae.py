"""The baselines of `rae` in the ledger: each group counts once, wherever the process is killed."""

import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from ramify.env import plugin
from ramify.orchestrate.batches import rebuild_forests
from ramify.orchestrate.core import ALGORITHM_STATE_PREFIX
from ramify.run.store import RunStore
from ramify.run.store.audit import audit
from ramify.run.store.ledger import Ledger
from ramify.trace import Trace
from tests.support.orchestrator import MEMORY, Killed, KilledLedger, World, make_commit, open_core
from tests.support.traces import make_trace, refuse_top_logprobs

pytestmark = pytest.mark.promise

RAE = plugin.build_plugin("algorithm", {"id": "rae", "decay": 0.8})
STEPS = 4 if os.environ.get("RAMIFY_FULL") else 2
WORLD = World(steps=STEPS, batch=1, bound=0)  # one group at a time: they are scored in the order of their numbers


@dataclass
class Outcome:
    """What a run leaves: the baselines, and the advantages of the trained tokens in order."""

    baselines: dict[str, dict[str, list[float]]]
    advantages: list[float]
    num_changes: int


def play_game(group: int, attempt: int) -> list[Trace]:
    """Return the traces of a game with two agents; its rewards depend only on its number."""
    rng = Random(f"{group}.{attempt}")
    rewards = {"first": 1 + rng.random(), "second": -rng.random()}
    name = f"{group}.{attempt}"
    return [make_trace(f"{name}.{agent}", reward, (10, 11 + attempt), agent=agent) for agent, reward in rewards.items()]


async def drive(ledger: Ledger) -> None:
    """Run every step of the run; the trainer is replaced after each commit."""
    core = await open_core(ledger, WORLD, algorithm=RAE)
    await core.register_trainer()
    for step in range(core.ledger_progress.committed, WORLD.steps):
        for number in core.get_groups_to_score():
            await core.score_group(number)
        await core.issue_groups()
        while queued := core.next_attempt(1):
            number, attempt = queued[1].group, queued[1].attempt
            await core.record_attempt(number, attempt, play_game(number, attempt))
        for number in core.get_groups_to_score():
            await core.score_group(number)
        await core.form_batches()
        assert await core.serve_batch(step, core.ledger_progress.incarnation) is not None
        await core.acknowledge_step(step, core.ledger_progress.incarnation)
        await core.commit_version(make_commit(core, step + 1))
        core.record_applied_version(core.ledger_progress.incarnation, step + 1)


def run(kill: tuple[int, bool] | None = None) -> Outcome:
    """Run to the end; with `kill`, the process dies at that change of the ledger and is started again."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        for changes in [kill, None] if kill else [None]:
            with RunStore.open(Path(folder)) as store:
                ledger = KilledLedger.open(store)
                ledger.changes_left, ledger.kill_after_write = changes or (10_000, False)
                try:
                    asyncio.run(drive(ledger))
                except Killed:
                    continue
                assert audit(ledger, finished=False) == []
                forests = [
                    forest
                    for batch in ledger.batches()
                    for forest in rebuild_forests(batch, store.read_traces, refuse_top_logprobs)
                ]
                advantages = [value for forest in forests for value in forest.targets.advantage.tolist()]
                assert store.select("SELECT count(*) FROM algorithm_states") == [(0,)]
                return Outcome(ledger.load_states(ALGORITHM_STATE_PREFIX), advantages, 10_000 - ledger.changes_left)
    raise AssertionError("the run was not finished")


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    return run()


def test_undisturbed_run_counts_every_group_once(undisturbed):
    num_groups = [count for baselines in undisturbed.baselines.values() for _, count in baselines.values()]
    assert sum(num_groups) == 2 * WORLD.steps  # two agents
    assert all(baselines["second"][0] < 0 < baselines["first"][0] for baselines in undisturbed.baselines.values())


@pytest.mark.parametrize(
    "after_write",
    [False, pytest.param(True, marks=pytest.mark.full("the ledger is the same as before the next change"))],
)
def test_baselines_after_a_kill_at_any_write_equal_those_of_an_undisturbed_run(undisturbed, after_write):
    for change in range(1, undisturbed.num_changes + 1):
        killed = run((change, after_write))
        assert killed.baselines == undisturbed.baselines, change
        assert killed.advantages == undisturbed.advantages, change
