"""A whole run without processes, killed at any write: the same command again goes on, nothing is lost or doubled."""

import asyncio
import contextlib
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.env import plugin
from ramify.envserver.messages import GroupScores
from ramify.errors import ConfigInvalid, Failure, RequestInvalid, TransitionRefused
from ramify.orchestrate import attempt_dispatcher as sampling_module
from ramify.orchestrate.admission import AdmissionLimits
from ramify.orchestrate.attempt_dispatcher import AttemptDispatcher, ConnectedSource
from ramify.orchestrate.batches import rebuild_forests
from ramify.orchestrate.core import OrchestratorCore
from ramify.orchestrate.curriculum import Curriculum, PoolsConfig, PoolsCurriculum, ShuffleConfig, ShuffleCurriculum
from ramify.orchestrate.group_tracker import GroupProgress
from ramify.orchestrate.progress import RunProgress
from ramify.orchestrate.scoring import ScoringRules, SourceSpec
from ramify.orchestrate.source_mix import SourceMix
from ramify.orchestrate.task_cache import TaskCache
from ramify.store import RunStore
from ramify.store.audit import audit
from ramify.store.group_state import DropReason, GroupState
from ramify.store.ledger import Ledger
from ramify.store.run_log import RunLog
from tests.orchestrate.rollouts import rollout

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where a sync costs nothing
TASKS = {"reverse": 3, "wordle": 4}
DIED = Failure("WorkerDied", "exit code -9", "system", True)


class Killed(Exception):
    """The process is no more."""


class Mortal(Ledger):
    """A ledger whose process dies at its n-th change, before it is made or just after."""

    left: int | None = None
    after = False

    async def _submit_change(self, apply, rollouts=()) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left == 0 and not self.after:
                raise Killed
        await super()._submit_change(apply, rollouts)
        if self.left == 0:
            raise Killed


@dataclass
class World:
    steps: int = 4
    batch: int = 2
    bound: int = 2
    size: int = 2
    seed: int = 0
    failing: float = 0.2
    kills: float = 0.1  # of the trainer, after a step
    bombs: list[tuple[int, bool]] = field(default_factory=list)


def sources(world: World, **more) -> dict[str, SourceSpec]:
    algorithm = plugin.build_plugin("algorithm", {"id": "grpo"})
    sizes = {"reverse": world.size, "wordle": world.size + 1}
    return {
        name: SourceSpec(
            name=name, algorithm=algorithm, group_size=sizes[name], max_tries=2, tasks_per_epoch=count, **more
        )
        for name, count in TASKS.items()
    }


async def opened(ledger: Ledger, world: World, **more) -> OrchestratorCore:
    curricula = {name: ShuffleCurriculum(ShuffleConfig(), count, f"0:{name}") for name, count in TASKS.items()}
    mix = SourceMix({"reverse": 3.0, "wordle": 1.0}, curricula)
    filters = (plugin.build_plugin("filter", {"id": "zero_advantage", "mode": "enforce"}),)
    rules = ScoringRules(1000, seq_len=64, filters=filters)
    shape = AdmissionLimits.from_max_staleness(world.batch, world.bound)
    return await OrchestratorCore.open(ledger, mix, sources(world, **more), rules, shape, world.steps)


async def live(core: OrchestratorCore, world: World, rng: Random) -> None:
    """Everything around the core: an env server, a trainer, an engine."""
    await core.restart_trainer()
    version = core.ledger_progress.committed
    out = []
    turns = 0
    while version < world.steps:
        turns += 1
        assert turns < 3000, "the run stands still"
        for number in core.get_groups_to_score():
            await core.score_group(number)
        await core.issue_groups()
        while taken := core.next_attempt(6):
            out.append(taken)
        if out:
            group, order = out.pop(rng.randrange(len(out)))
            number, attempt = order.group, order.attempt
            if rng.random() < world.failing:
                standing = await core.record_failure(number, attempt, DIED)
            else:
                name = f"{number}.{attempt}"
                trace = rollout(name, float(rng.randrange(2)), (10, 11 + attempt), version=group.version)
                standing = await core.record_attempt(number, attempt, [trace], {"stop": "done"})
            if standing is GroupProgress.TOO_FEW:
                out = [each for each in out if each[1].group != number]
            if standing is GroupProgress.COMPLETE:
                await core.score_group(number)
        await core.form_batches()
        if rng.random() < 0.5 and (batch := await core.serve_batch(version)):
            again = rebuild_forests(batch, core.ledger.store.read_traces)
            assert [each.token_ids.tolist() for each in core.get_forests(batch)] == [
                each.token_ids.tolist() for each in again
            ]
            await core.acknowledge_step(version)
            version += 1
            if rng.random() < world.kills:
                version = (await core.restart_trainer()).committed
                continue
            if version % 2 == 0 or version == world.steps:
                await core.commit_version(version)
            core.record_applied_version(core.ledger_progress.incarnation, version)
    await core.drop_open_groups()


def run(world: World) -> None:
    """A run that is started again after every bomb."""
    rng = Random(world.seed)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        for bomb in [*world.bombs, None]:
            with RunStore.open(Path(folder)) as store:
                ledger = Mortal.open(store)
                if bomb is not None:
                    ledger.left, ledger.after = bomb
                try:
                    asyncio.run(whole(ledger, world, rng))
                except Killed:
                    assert audit(ledger, finished=False) == []
                    continue
                check(ledger, world)
                return


async def whole(ledger: Ledger, world: World, rng: Random) -> None:
    await live(await opened(ledger, world), world, rng)


def check(ledger: Ledger, world: World) -> None:
    assert audit(ledger) == []
    assert ledger.progress().committed == world.steps
    groups = ledger.groups()
    trained = [group for group in groups if group.state is GroupState.TRAINED]
    assert len(trained) == world.steps * world.batch
    assert all(0 <= group.step - group.version <= world.bound for group in trained)
    assert {group.reason for group in groups if group.state is GroupState.DROPPED} <= {
        DropReason.FILTERED,
        DropReason.TOO_FEW,
    }
    counts = Counter(group.source for group in groups)
    assert abs(counts["reverse"] - 0.75 * len(groups)) <= 1


def test_a_run_ends_with_every_group_trained_or_dropped():
    run(World(steps=6))


@settings(max_examples=200 if os.environ.get("RAMIFY_FULL") else 12)
@given(
    st.builds(
        World,
        steps=st.integers(1, 5),
        batch=st.integers(1, 3),
        bound=st.integers(0, 3),
        size=st.integers(2, 3),
        seed=st.integers(0, 2**20),
        failing=st.sampled_from([0.0, 0.2, 0.6]),
        kills=st.sampled_from([0.0, 0.3]),
        bombs=st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=4),
    )
)
def test_a_run_that_is_killed_at_any_write_goes_on_and_loses_nothing(world):
    run(world)


@pytest.mark.parametrize("fewer", [{"bound": 0}, {"batch": 1}, {"batch": 1, "bound": 0}])
def test_a_run_goes_on_with_fewer_slots_than_it_has_groups(ledger, fewer):
    """A configuration that asks for less is another knob: the groups that are out already are trained all the same."""
    world, rng = World(steps=3, batch=3, bound=3), Random(0)

    async def before():
        core = await opened(ledger, world)
        await core.issue_groups()

    asyncio.run(before())
    smaller = replace(world, **fewer)
    assert ledger.issued() > AdmissionLimits.from_max_staleness(smaller.batch, smaller.bound).slots
    asyncio.run(whole(ledger, smaller, rng))
    assert audit(ledger) == []
    assert ledger.marks().committed == world.steps


@pytest.fixture
def ledger(tmp_path):
    with RunStore.open(tmp_path) as store:
        yield Ledger.open(store)


def test_only_missing_attempts_are_sent_out_again(ledger):
    async def before():
        core = await opened(ledger, World(size=3))
        (first, *_) = await core.issue_groups()
        assert first.size == 3
        taken = [core.next_attempt(99)[1] for _ in range(3)]
        await core.record_attempt(0, taken[1].attempt, [rollout("0.1", 1.0)])

    async def after():
        core = await opened(ledger, World(size=3))
        return [(order.group, order.attempt) for _, order in iter(lambda: core.next_attempt(99), None)]

    asyncio.run(before())
    sent = asyncio.run(after())
    assert (0, 1) not in sent
    assert sent[:2] == [(0, 0), (0, 2)]
    assert len(sent) == sum(group.size for group in ledger.groups()) - 1


def test_a_group_with_a_missing_group_reward_is_dropped_by_that_name(ledger):
    async def story():
        core = await opened(ledger, World(), group_rewards=frozenset({"ranked"}))
        await core.issue_groups()
        for attempt in range(2):
            core.next_attempt(9)
            trace = rollout(f"0.{attempt}", float(attempt))
            trace.rewards["ranked"] = None
            standing = await core.record_attempt(0, attempt, [trace])
        assert standing is GroupProgress.COMPLETE
        assert (await core.score_group(0)).batch_group is None
        return ledger.group(0)

    group = asyncio.run(story())
    assert (group.reason, group.detail) == (DropReason.UNSCORED, "ranked")


def test_rewards_of_the_group_reach_the_stored_traces(ledger):
    async def story():
        core = await opened(ledger, World(), group_rewards=frozenset({"ranked"}))
        await core.issue_groups()
        for attempt in range(2):
            core.next_attempt(9)
            trace = rollout(f"0.{attempt}", 0.0)
            trace.rewards["ranked"] = None
            await core.record_attempt(0, attempt, [trace])
        for place, trace in enumerate(core.get_traces(0)):
            trace.rewards["ranked"] = (float(place), 1.0)
        assert (await core.score_group(0, {0: {}, 1: {"ranked": 1}})).batch_group is not None

    asyncio.run(story())
    assert ledger.store.read("0.1")[0].reward == 1.0
    (row,) = ledger.store.rows(id="0.1")
    assert (row.reward, row.summary) == (1.0, {"ranked": 1})
    assert ledger.attempts(0)[1].notes["advantage"] > 0


def test_an_attempt_that_fails_for_good_takes_a_small_group_with_it(ledger):
    async def story():
        core = await opened(ledger, World(size=2))
        await core.issue_groups()
        core.next_attempt(9), core.next_attempt(9)
        found = [await core.record_failure(0, 0, DIED) for _ in range(2)]
        assert core.attempt_queue.num_in_flight == 0
        return [*found, await core.record_attempt(0, 1, [rollout("0.1", 1.0)])]

    assert asyncio.run(story()) == [GroupProgress.OPEN, GroupProgress.TOO_FEW, GroupProgress.TOO_FEW]
    group = ledger.group(0)
    assert (group.reason, group.detail) == (DropReason.TOO_FEW, "1 of 2 attempts failed: WorkerDied")


def test_everything_may_happen_at_once(ledger):
    """Attempts that come back together complete their group once; batches are cut once; dropped groups stay dropped."""

    async def story():
        core = await opened(ledger, World(batch=3, bound=3, steps=4))
        issued = await asyncio.gather(core.issue_groups(), core.issue_groups())
        assert sorted(group.number for groups in issued for group in groups) == list(range(core.admission.num_active))
        taken = [order for _, order in iter(lambda: core.next_attempt(99), None)]

        async def come_back(order):
            if order.group == 0:
                failure = Failure("TokensRequired", "no token ids", "system", False)
                return order.group, await core.record_failure(order.group, order.attempt, failure)
            trace = rollout(f"{order.group}.{order.attempt}", float(order.attempt))
            return order.group, await core.record_attempt(order.group, order.attempt, [trace])

        found = await asyncio.gather(*map(come_back, taken))
        complete = [group for group, standing in found if standing is GroupProgress.COMPLETE]
        assert sorted(complete) == list(range(1, core.admission.num_active + 1))
        assert [standing for group, standing in found if group == 0] == [GroupProgress.TOO_FEW] * 2
        await asyncio.gather(*(core.score_group(group) for group in (*complete, *complete, 0)))
        batches = [batch for cut in await asyncio.gather(core.form_batches(), core.form_batches()) for batch in cut]
        assert [batch.step for batch in batches] == list(range(len(batches)))
        assert len(batches) > 1
        assert audit(ledger, finished=False) == []

    asyncio.run(story())


def test_weights_of_an_earlier_incarnation_free_no_slot(ledger):
    async def story():
        core = await opened(ledger, World())
        marks = await core.restart_trainer()
        core.record_applied_version(marks.incarnation - 1, 3)
        assert core.admission.applied_version == 0
        core.record_applied_version(marks.incarnation, 3)
        assert core.admission.applied_version == 3

    asyncio.run(story())


def test_a_run_cannot_end_before_its_last_batch(ledger):
    async def story():
        core = await opened(ledger, World())
        with pytest.raises(TransitionRefused, match="batch 0 is still to be cut"):
            await core.drop_open_groups()

    asyncio.run(story())


@pytest.mark.parametrize("count", [2, 5])
def test_an_epoch_is_not_gone_on_with_when_its_tasks_are_others(ledger, monkeypatch, count):
    async def before():
        await (await opened(ledger, World())).issue_groups()

    asyncio.run(before())
    monkeypatch.setitem(TASKS, "reverse", count)
    with pytest.raises(ConfigInvalid, match=f"train source reverse: its taskset has {count} tasks, and had 3"):
        asyncio.run(opened(ledger, World()))


class Judge:
    """An env server whose group reward raises a few times."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures, self.asked = failures, 0

    async def score_group(self, task, traces, **_) -> GroupScores:
        self.asked += 1
        if self.failures:
            failure = self.failures.pop(0)
            return GroupScores([{"best": None} for _ in traces], [[failure] for _ in traces])
        return GroupScores([{"best": (float(at), 1.0)} for at in range(len(traces))], [[] for _ in traces])


def test_a_run_may_go_on_with_a_curriculum_that_has_epochs(ledger):
    """What was chosen without any is in none of them."""
    (source, *_), rules = sources(World()).values(), ScoringRules(1000, seq_len=64, filters=())

    async def issue(curriculum: Curriculum, epoch: int | None) -> None:
        mix, known = (
            SourceMix({source.name: 1.0}, {source.name: curriculum}),
            {source.name: replace(source, epoch=epoch)},
        )
        core = await OrchestratorCore.open(ledger, mix, known, rules, AdmissionLimits.from_max_staleness(4, 0), None)
        for _ in range(2):
            for group in await core.issue_groups():
                await core.drop_group(group.number, DropReason.CANCELLED)

    asyncio.run(issue(PoolsCurriculum(PoolsConfig(), 3, "0"), None))
    asyncio.run(issue(ShuffleCurriculum(ShuffleConfig(), 3, "0"), 3))
    assert ledger.issued() == 16
    assert audit(ledger) == []


@pytest.mark.parametrize("times", [1, 2])
def test_a_group_reward_that_raises_is_asked_for_again_and_its_failure_is_told(ledger, monkeypatch, times):
    monkeypatch.setattr(sampling_module, "PAUSE", 0.0)
    asleep = Failure("JudgeError", "the judge sleeps", "system", True)

    async def story():
        core = await opened(ledger, World(size=2), group_rewards=frozenset(["best"]))
        await core.issue_groups()
        for attempt in range(2):
            core.next_attempt(99)
            trace = rollout(f"0.{attempt}", 0.0, (10, 11 + attempt))
            trace.rewards["best"] = None
            await core.record_attempt(0, attempt, [trace])
        client, told = Judge([asleep] * times), []
        served = ConnectedSource("reverse", client, TaskCache("reverse", client), True, 9.0, 2, 9.0)  # type: ignore[arg-type]
        sampling = AttemptDispatcher(
            core,
            {"reverse": served},
            seed=0,
            get_limit=lambda: 0,
            on_group_scored=lambda *_: None,
            on_failure=lambda where, failure: told.append(failure.name),
        )
        await settled(core, sampling)
        assert told == ["JudgeError"] * times
        return ledger.group(0)

    group = asyncio.run(story())
    if times == 1:
        assert group.state is GroupState.SCORED
    else:
        assert (group.reason, group.detail) == (DropReason.UNSCORED, "JudgeError: the judge sleeps")


async def settled(core: OrchestratorCore, sampling: AttemptDispatcher) -> None:
    """Run it until no group is left to be judged."""
    running = asyncio.create_task(sampling.run())
    async with asyncio.timeout(30):
        while core.get_groups_to_score() and not running.done():
            await asyncio.sleep(0.01)
    assert not running.done(), running.exception()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


class Comparing:
    """An env server that cannot compare a group; the run has dropped all others when it says so."""

    def __init__(self, core: OrchestratorCore) -> None:
        self.core = core
        self.asked = 0

    async def score_group(self, task, traces, **_) -> None:
        self.asked += 1
        for number in self.core.get_groups_to_score()[1:]:
            await self.core.drop_group(number, DropReason.RUN_ENDED)
        raise RequestInvalid("it cannot")


def test_a_run_may_end_while_groups_of_an_earlier_process_are_settled(ledger):
    async def story():
        core = await opened(ledger, World())
        await core.issue_groups()
        while (taken := core.next_attempt(99)) is not None:
            _, order = taken
            await core.record_attempt(order.group, order.attempt, [rollout(f"{order.group}.{order.attempt}", 1.0)])
        assert len(core.get_groups_to_score()) > 1
        client = Comparing(core)
        served = ConnectedSource("reverse", client, TaskCache("reverse", client), True, 9.0, 1, 9.0)  # type: ignore[arg-type]
        sampling = AttemptDispatcher(
            core,
            {name: replace(served, name=name) for name in TASKS},
            seed=0,
            get_limit=lambda: 0,
            on_group_scored=lambda *_: None,
            on_failure=lambda *_: None,
        )
        await settled(core, sampling)
        assert client.asked == 1
        assert {group.reason for group in ledger.groups()} == {DropReason.UNSCORED, DropReason.RUN_ENDED}

    asyncio.run(story())


@pytest.mark.parametrize("mode", ["monitor", "enforce"])
def test_how_often_a_filter_fires_is_a_number_of_the_step(ledger, mode):
    async def story():
        core = await opened(ledger, World())
        tables = [{"id": "gibberish"}, {"id": "zero_advantage", "mode": mode}]
        core.scoring_rules = replace(
            core.scoring_rules, filters=tuple(plugin.build_plugin("filter", table) for table in tables)
        )
        await core.issue_groups()
        out = [order for _, order in iter(lambda: core.next_attempt(99), None)]
        for order in out:
            reward = 1.0 if order.group == 0 else float(order.attempt == 0)
            await core.record_attempt(order.group, order.attempt, [rollout(f"{order.group}.{order.attempt}", reward)])
        served = ConnectedSource("", Judge([]), TaskCache("", Judge([])), False, 9.0, 1, 9.0)  # type: ignore[arg-type]
        progress = RunProgress(RunLog(ledger.store))
        sampling = AttemptDispatcher(
            core,
            dict.fromkeys(TASKS, served),
            seed=0,
            get_limit=lambda: 0,
            on_group_scored=progress.record_group,
            on_failure=progress.record_failure,
        )
        await settled(core, sampling)
        progress.record_batches({0: [0]})
        same = [order for order in out if order.group == 0]
        assert progress.latest_metrics["rollouts"] == len(out) > len(same) == 2
        assert progress.latest_metrics["filter/zero_advantage"] == pytest.approx(len(same) / len(out))
        assert progress.latest_metrics["filter/gibberish"] == 0.0

    asyncio.run(story())
    assert ledger.group(0).state is (GroupState.DROPPED if mode == "enforce" else GroupState.BATCHED)
