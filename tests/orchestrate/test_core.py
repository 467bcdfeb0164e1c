"""A whole run without processes, killed at any write: it resumes, and no group is lost or trained twice."""

import asyncio
import contextlib
import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.env import plugin
from ramify.envserver.messages import GroupScores, TaskItem, TaskPage
from ramify.errors import BatchCorrupt, ConfigInvalid, Failure, ModelUnsupported, RequestInvalid, TransitionRefused
from ramify.orchestrate import connected_source
from ramify.orchestrate.admission import AdmissionLimits
from ramify.orchestrate.algorithms import Algorithm, AlgorithmConfig
from ramify.orchestrate.algorithms.base import annotate_advantage
from ramify.orchestrate.attempt_dispatcher import AttemptDispatcher
from ramify.orchestrate.batches import rebuild_forests
from ramify.orchestrate.connected_source import ConnectedSource
from ramify.orchestrate.core import OrchestratorCore
from ramify.orchestrate.curriculum import Curriculum, PoolsConfig, PoolsCurriculum, ShuffleConfig, ShuffleCurriculum
from ramify.orchestrate.group_tracker import GroupProgress
from ramify.orchestrate.progress import RunProgress
from ramify.orchestrate.reference_scores import NodeScore
from ramify.orchestrate.scoring import ScoringRules, SourceSpec
from ramify.orchestrate.source_mix import SourceMix
from ramify.orchestrate.task_cache import TaskCache
from ramify.store import RunStore
from ramify.store.audit import audit
from ramify.store.group_state import DropReason, GroupState
from ramify.store.ledger import CommitRecord, GroupRecord, Ledger
from ramify.store.run_log import RunLog
from ramify.trace.annotation import TOP_DTYPE
from ramify.view.token_check import check_trained_tokens
from tests.support.traces import make_trace, refuse_top_logprobs

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where a sync costs nothing
TASKS = {"reverse": 3, "wordle": 4}
DIED = Failure("WorkerDied", "exit code -9", "system", True)


class Killed(Exception):
    """The process was killed."""


class KilledLedger(Ledger):
    """A ledger whose process is killed at its n-th change, before or after it is written."""

    changes_left: int | None = None
    kill_after_write = False

    async def _submit_change(self, apply, rollouts=()) -> None:
        if self.changes_left is not None:
            self.changes_left -= 1
            if self.changes_left == 0 and not self.kill_after_write:
                raise Killed
        await super()._submit_change(apply, rollouts)
        if self.changes_left == 0:
            raise Killed


@dataclass
class World:
    steps: int = 4
    batch: int = 2
    bound: int = 2
    size: int = 2
    seed: int = 0
    failure_rate: float = 0.2
    trainer_kill_rate: float = 0.1  # after a step
    repeat_rate: float = 0.0  # of results that arrive once more, from an env server that was given up
    process_kills: list[tuple[int, bool]] = field(default_factory=list)  # changes until the kill, and whether after
    results: dict[str, list[str]] = field(default_factory=dict)  # by rollout: trace ids until the first that counted
    counted: set[str] = field(default_factory=set)  # rollouts whose first result has counted

    async def record(self, core: OrchestratorCore, group: GroupRecord, attempt: int, rng: Random, suffix: str = ""):
        """Report the result of an attempt to the core."""
        if rng.random() < self.failure_rate:
            return await core.record_failure(group.number, attempt, DIED)
        rollout_id = f"{group.number}.{attempt}"
        trace_id = f"{rollout_id}{suffix}"
        if rollout_id not in self.counted:
            self.results.setdefault(rollout_id, []).append(trace_id)
        trace = make_trace(trace_id, float(rng.randrange(2)), (10, 11 + attempt), version=group.version)
        progress = await core.record_attempt(group.number, attempt, [trace], {"stop": "done"})
        self.counted.add(rollout_id)
        return progress


def sources(world: World, **more) -> dict[str, SourceSpec]:
    more.setdefault("algorithm", plugin.build_plugin("algorithm", {"id": "grpo"}))
    sizes = {"reverse": world.size, "wordle": world.size + 1}
    return {
        name: SourceSpec(name=name, group_size=sizes[name], max_tries=2, tasks_per_epoch=count, **more)
        for name, count in TASKS.items()
    }


async def open_core(ledger: Ledger, world: World, **more) -> OrchestratorCore:
    curricula = {name: ShuffleCurriculum(ShuffleConfig(), count, f"0:{name}") for name, count in TASKS.items()}
    mix = SourceMix({"reverse": 3.0, "wordle": 1.0}, curricula)
    filters = (plugin.build_plugin("filter", {"id": "zero_advantage", "mode": "enforce"}),)
    rules = ScoringRules(1000, seq_len=64, filters=filters)
    shape = AdmissionLimits.from_max_staleness(world.batch, world.bound)
    return await OrchestratorCore.open(ledger, mix, sources(world, **more), rules, shape, world.steps)


def make_commit(core: OrchestratorCore, version: int) -> CommitRecord:
    incarnation = core.ledger_progress.incarnation
    return CommitRecord(version, incarnation, f"step_{version:06}-{incarnation}", "digest")


async def drive(core: OrchestratorCore, world: World, rng: Random) -> None:
    """Drive the core like env servers, a trainer and engines do."""
    await core.register_trainer()
    version = core.ledger_progress.committed
    in_flight, ended = [], []
    turns = 0
    while version < world.steps:
        turns += 1
        assert turns < 3000, "the run makes no progress"
        for number in core.get_groups_to_score():
            await core.score_group(number)
        await core.issue_groups()
        while next_attempt := core.next_attempt(6):
            in_flight.append(next_attempt)
        if in_flight:
            group, queued = in_flight.pop(rng.randrange(len(in_flight)))
            number = queued.group
            progress = await world.record(core, group, queued.attempt, rng)
            ended.append((group, queued.attempt))
            if rng.random() < world.repeat_rate:
                group, attempt = ended[rng.randrange(len(ended))]
                await world.record(core, group, attempt, rng, suffix=f"-{turns}")
            if progress is GroupProgress.TOO_FEW:
                in_flight = [entry for entry in in_flight if entry[1].group != number]
            if progress is GroupProgress.COMPLETE:
                await core.score_group(number)
        await core.form_batches()
        if rng.random() < 0.5 and (batch := await core.serve_batch(version, core.ledger_progress.incarnation)):
            rebuilt = rebuild_forests(batch, core.ledger.store.read_traces, refuse_top_logprobs)
            assert [forest.token_ids.tolist() for forest in core.get_forests(batch)] == [
                forest.token_ids.tolist() for forest in rebuilt
            ]
            await core.acknowledge_step(version, core.ledger_progress.incarnation)
            version += 1
            if rng.random() < world.trainer_kill_rate:
                await core.register_trainer()
                version = core.ledger_progress.committed
                continue
            if version % 2 == 0 or version == world.steps:
                await core.commit_version(make_commit(core, version))
            core.record_applied_version(core.ledger_progress.incarnation, version)
    await core.drop_open_groups()


def run(world: World) -> None:
    """Run to the end, with a restart after every kill."""
    rng = Random(world.seed)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        for kill in [*world.process_kills, None]:
            with RunStore.open(Path(folder)) as store:
                ledger = KilledLedger.open(store)
                if kill is not None:
                    ledger.changes_left, ledger.kill_after_write = kill
                try:
                    asyncio.run(open_and_drive(ledger, world, rng))
                except Killed:
                    assert audit(ledger, finished=False) == []
                    continue
                check(ledger, world)
                return


async def open_and_drive(ledger: Ledger, world: World, rng: Random) -> None:
    await drive(await open_core(ledger, world), world, rng)


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
    for record in ledger.store.rollouts():
        assert ledger.store.read_traces(record.id)[0].id in world.results[record.id]
    counts = Counter(group.source for group in groups)
    assert abs(counts["reverse"] - 0.75 * len(groups)) <= 1


def test_run_ends_with_every_group_trained_or_dropped():
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
        failure_rate=st.sampled_from([0.0, 0.2, 0.6]),
        trainer_kill_rate=st.sampled_from([0.0, 0.3]),
        repeat_rate=st.sampled_from([0.0, 0.5]),
        process_kills=st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=4),
    )
)
def test_run_killed_at_any_write_resumes_without_loss_and_counts_each_attempt_once(world):
    run(world)


@pytest.mark.parametrize("fewer", [{"bound": 0}, {"batch": 1}, {"batch": 1, "bound": 0}])
def test_run_resumes_with_fewer_slots_than_groups(ledger, fewer):
    """The limits may change between starts: groups in flight are trained all the same."""
    world, rng = World(steps=3, batch=3, bound=3), Random(0)

    async def before():
        core = await open_core(ledger, world)
        await core.issue_groups()

    asyncio.run(before())
    smaller = replace(world, **fewer)
    assert ledger.num_issued() > AdmissionLimits.from_max_staleness(smaller.batch, smaller.bound).slots
    asyncio.run(open_and_drive(ledger, smaller, rng))
    assert audit(ledger) == []
    assert ledger.progress().committed == world.steps


@pytest.fixture
def ledger(tmp_path):
    with RunStore.open(tmp_path) as store:
        yield Ledger.open(store)


def test_only_pending_attempts_are_queued_after_a_restart(ledger):
    async def before():
        core = await open_core(ledger, World(size=3))
        (first, *_) = await core.issue_groups()
        assert first.size == 3
        taken = [core.next_attempt(99)[1] for _ in range(3)]
        await core.record_attempt(0, taken[1].attempt, [make_trace("0.1", 1.0)])

    async def after():
        core = await open_core(ledger, World(size=3))
        return [(queued.group, queued.attempt) for _, queued in iter(lambda: core.next_attempt(99), None)]

    asyncio.run(before())
    sent = asyncio.run(after())
    assert (0, 1) not in sent
    assert sent[:2] == [(0, 0), (0, 2)]
    assert len(sent) == sum(group.size for group in ledger.groups()) - 1


def test_missing_group_reward_drops_the_group_with_its_name(ledger):
    async def main():
        core = await open_core(ledger, World(), group_rewards=frozenset({"ranked"}))
        await core.issue_groups()
        for attempt in range(2):
            core.next_attempt(9)
            trace = make_trace(f"0.{attempt}", float(attempt))
            trace.rewards["ranked"] = None
            progress = await core.record_attempt(0, attempt, [trace])
        assert progress is GroupProgress.COMPLETE
        assert (await core.score_group(0)).batch_group is None
        return ledger.get_group(0)

    group = asyncio.run(main())
    assert (group.reason, group.detail) == (DropReason.UNSCORED, "ranked")


def test_group_rewards_are_stored_with_the_traces(ledger):
    async def main():
        core = await open_core(ledger, World(), group_rewards=frozenset({"ranked"}))
        await core.issue_groups()
        for attempt in range(2):
            core.next_attempt(9)
            trace = make_trace(f"0.{attempt}", 0.0)
            trace.rewards["ranked"] = None
            await core.record_attempt(0, attempt, [trace])
        for place, trace in enumerate(core.get_traces(0)):
            trace.rewards["ranked"] = (float(place), 1.0)
        assert (await core.score_group(0, {0: {}, 1: {"ranked": 1}})).batch_group is not None

    asyncio.run(main())
    assert ledger.store.read_traces("0.1")[0].reward == 1.0
    (row,) = ledger.store.rollouts(id="0.1")
    assert (row.reward, row.summary) == (1.0, {"ranked": 1})
    assert ledger.attempts(0)[1].notes["advantage"] > 0


async def sample_group(core: OrchestratorCore, number: int) -> None:
    while (queued := core.next_attempt(99)) is not None:
        if queued[1].group == number:
            name = f"{number}.{queued[1].attempt}"
            await core.record_attempt(number, queued[1].attempt, [make_trace(name, float(queued[1].attempt))])


def test_scores_of_a_teacher_survive_a_restart_and_move_into_the_batch(ledger):
    world, opd = World(size=2, batch=1), plugin.build_plugin("algorithm", {"id": "opd"})
    scores = {(f"0.{attempt}", 1): NodeScore(np.array([-0.25, -1.5 - attempt], np.float32)) for attempt in range(2)}

    async def before():
        core = await open_core(ledger, world, algorithm=opd)
        await core.issue_groups()
        await sample_group(core, 0)
        assert (await core.score_group(0, reference_scores=scores)).batch_group is not None
        assert ledger.get_reference_scores(0) is not None

    async def after():
        core = await open_core(ledger, world, algorithm=opd)
        assert core.get_groups_to_score() == []
        (batch,) = await core.form_batches()
        return rebuild_forests(batch, ledger.store.read_traces, refuse_top_logprobs)

    asyncio.run(before())
    (forest,) = asyncio.run(after())
    assert sorted(forest.targets.ref_logprob.tolist()) == [-2.5, -1.5, -0.25, -0.25]
    assert forest.count_by_component() == {"rl": 0, "ce": 0, "ref_kl": 4, "kl": 0}
    assert ledger.get_reference_scores(0) is None  # the batch has them


class Alternate(Algorithm):
    """An algorithm whose state is empty before every second group; `states` has that before each group."""

    def __init__(self) -> None:
        super().__init__(AlgorithmConfig())
        self.states: dict[int, dict] = {}

    def annotate_with_state(self, group, state):
        self.states[int(group[0].id.partition(".")[0])] = dict(state)
        annotations = [note for index, trace in enumerate(group) for note in annotate_advantage(trace, index - 0.5)]
        return annotations, {} if state else {"odd": True}


def test_a_state_may_become_empty_again(ledger):
    algorithm = Alternate()

    async def main():
        core = await open_core(ledger, World(size=2, batch=4), algorithm=algorithm)
        groups, states_by_source = await core.issue_groups(), {}
        while (queued := core.next_attempt(99)) is not None:
            number, attempt = queued[1].group, queued[1].attempt
            await core.record_attempt(number, attempt, [make_trace(f"{number}.{attempt}", float(attempt))])
        for group in groups:
            await core.score_group(group.number)
            states_by_source.setdefault(group.source, []).append(algorithm.states[group.number])
        assert states_by_source["reverse"][:3] == [{}, {"odd": True}, {}]

    asyncio.run(main())


def test_likeliest_tokens_of_a_teacher_are_in_a_file_and_survive_a_restart(ledger, tmp_path):
    """They are written before the group counts as scored, and no byte of them is in the database."""
    world, opd = World(size=2, batch=1), plugin.build_plugin("algorithm", {"id": "opd", "top_k": 3})
    top = np.zeros((2, 3), TOP_DTYPE)
    top["token"], top["logprob"] = [[7, 8, 9], [1, 2, 3]], [[-0.5, -1.5, -2.5], [-0.25, -2.0, -3.0]]
    scores = {(f"0.{attempt}", 1): NodeScore(np.array([-0.5, -1.5], np.float32), top) for attempt in range(2)}

    async def score(number: int, **scores) -> OrchestratorCore:
        core = await open_core(ledger, world, algorithm=opd)
        await core.issue_groups()
        await sample_group(core, number)
        await core.score_group(number, **scores)
        return core

    async def form_batch():
        core = await open_core(ledger, world, algorithm=opd)
        (batch,) = await core.form_batches()
        return core, batch

    file = tmp_path / "top_logprobs" / "0.bin"
    asyncio.run(score(0, reference_scores=scores))
    assert len(ledger.get_reference_scores(0)) < 100
    file.rename(tmp_path / "moved")
    with pytest.raises(BatchCorrupt, match=r"0\.bin: .* cannot be read"):
        asyncio.run(form_batch())
    (tmp_path / "moved").rename(file)
    core, batch = asyncio.run(form_batch())
    restarted = asyncio.run(open_core(ledger, world, algorithm=opd))
    for forests in (core.get_forests(batch), restarted.get_forests(batch)):
        (forest,) = forests
        assert forest.targets.ref_top.tolist() == [*top.tolist(), *top.tolist()]
    check = check_trained_tokens(ledger.store)
    assert (check.num_entries, check.problems) == (4, [])
    with pytest.raises(BatchCorrupt, match=r"group 0 has no likeliest tokens of node 1 of trace 0\.0"):
        rebuild_forests(batch, ledger.store.read_traces, lambda number: {})
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BatchCorrupt, match=r"0\.bin: .* the checksum does not match"):
        restarted.get_forests(batch)
    file.unlink()
    with pytest.raises(BatchCorrupt, match="cannot be read"):
        restarted.get_forests(batch)


def test_dropped_group_leaves_no_file_of_likeliest_tokens(ledger, tmp_path):
    opd, bad = plugin.build_plugin("algorithm", {"id": "opd", "top_k": 1}), np.zeros((2, 1), TOP_DTYPE)
    scores = {(f"0.{attempt}", 1): NodeScore(np.full(2, np.nan, np.float32), bad) for attempt in range(2)}

    async def main():
        core = await open_core(ledger, World(size=2, batch=1), algorithm=opd)
        await core.issue_groups()
        await sample_group(core, 0)
        assert (await core.score_group(0, reference_scores=scores)).batch_group is None

    asyncio.run(main())
    assert list((tmp_path / "top_logprobs").iterdir()) == []


def test_group_without_its_scores_is_dropped(ledger):
    algorithm = plugin.build_plugin("algorithm", {"id": "grpo", "beta": 0.1})

    async def main():
        core = await open_core(ledger, World(size=2, batch=1), algorithm=algorithm)
        await core.issue_groups()
        await sample_group(core, 0)
        assert (await core.score_group(0)).batch_group is None
        return ledger.get_group(0)

    group = asyncio.run(main())
    assert group.reason is DropReason.NOT_FINITE and "no finite reference logprob" in group.detail


def test_dropped_attempt_drops_a_group_with_too_few_left(ledger):
    async def main():
        core = await open_core(ledger, World(size=2))
        await core.issue_groups()
        core.next_attempt(9), core.next_attempt(9)
        found = [await core.record_failure(0, 0, DIED) for _ in range(2)]
        assert core.attempt_queue.num_in_flight == 0
        return [*found, await core.record_attempt(0, 1, [make_trace("0.1", 1.0)])]

    assert asyncio.run(main()) == [GroupProgress.OPEN, GroupProgress.TOO_FEW, GroupProgress.TOO_FEW]
    group = ledger.get_group(0)
    assert (group.reason, group.detail) == (DropReason.TOO_FEW, "1 of 2 attempts failed: WorkerDied")


def test_concurrent_calls_take_turns(ledger):
    """Attempts that come back together complete their group once; batches are cut once; dropped groups stay dropped."""

    async def main():
        core = await open_core(ledger, World(batch=3, bound=3, steps=4))
        issued = await asyncio.gather(core.issue_groups(), core.issue_groups())
        assert sorted(group.number for groups in issued for group in groups) == list(range(core.admission.num_active))
        taken = [queued for _, queued in iter(lambda: core.next_attempt(99), None)]

        async def come_back(queued):
            if queued.group == 0:
                failure = Failure("TokensRequired", "no token ids", "system", False)
                return queued.group, await core.record_failure(queued.group, queued.attempt, failure)
            trace = make_trace(f"{queued.group}.{queued.attempt}", float(queued.attempt))
            return queued.group, await core.record_attempt(queued.group, queued.attempt, [trace])

        found = await asyncio.gather(*map(come_back, taken))
        complete = [group for group, progress in found if progress is GroupProgress.COMPLETE]
        assert sorted(complete) == list(range(1, core.admission.num_active + 1))
        assert [progress for group, progress in found if group == 0] == [GroupProgress.TOO_FEW] * 2
        await asyncio.gather(*(core.score_group(group) for group in (*complete, *complete, 0)))
        batches = [batch for cut in await asyncio.gather(core.form_batches(), core.form_batches()) for batch in cut]
        assert [batch.step for batch in batches] == list(range(len(batches)))
        assert len(batches) > 1
        assert audit(ledger, finished=False) == []

    asyncio.run(main())


def test_version_of_an_earlier_incarnation_frees_no_slot(ledger):
    async def main():
        core = await open_core(ledger, World())
        replaced, newest = await core.register_trainer(), await core.register_trainer()
        core.record_applied_version(replaced.incarnation, 3)
        assert core.admission.applied_version == 0
        core.record_applied_version(newest.incarnation, 3)
        assert core.admission.applied_version == 3

    asyncio.run(main())


def test_run_cannot_finish_before_its_last_batch(ledger):
    async def main():
        core = await open_core(ledger, World())
        with pytest.raises(TransitionRefused, match="batch 0 is not formed yet"):
            await core.drop_open_groups()

    asyncio.run(main())


@pytest.mark.parametrize("count", [2, 5])
def test_changed_task_count_is_refused_within_an_epoch(ledger, monkeypatch, count):
    async def before():
        await (await open_core(ledger, World())).issue_groups()

    asyncio.run(before())
    monkeypatch.setitem(TASKS, "reverse", count)
    with pytest.raises(
        ConfigInvalid, match=f"train source reverse: its taskset has {count} tasks, but the run was started with 3"
    ):
        asyncio.run(open_core(ledger, World()))


class FlakyGroupReward:
    """An env server whose group reward raises a few times."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures, self.num_calls = failures, 0

    async def score_group(self, task, traces, **_) -> GroupScores:
        self.num_calls += 1
        if self.failures:
            failure = self.failures.pop(0)
            return GroupScores([{"best": None} for _ in traces], [[failure] for _ in traces])
        return GroupScores([{"best": (float(index), 1.0)} for index in range(len(traces))], [[] for _ in traces])


def test_run_may_resume_with_a_curriculum_that_has_epochs(ledger):
    """Tasks that were chosen without epochs belong to no epoch."""
    (source, *_), rules = sources(World()).values(), ScoringRules(1000, seq_len=64, filters=())

    async def issue(curriculum: Curriculum, tasks_per_epoch: int | None) -> None:
        mix = SourceMix({source.name: 1.0}, {source.name: curriculum})
        specs = {source.name: replace(source, tasks_per_epoch=tasks_per_epoch)}
        core = await OrchestratorCore.open(ledger, mix, specs, rules, AdmissionLimits.from_max_staleness(4, 0), None)
        for _ in range(2):
            for group in await core.issue_groups():
                await core.drop_group(group.number, DropReason.CANCELLED)

    asyncio.run(issue(PoolsCurriculum(PoolsConfig(), 3, "0"), None))
    asyncio.run(issue(ShuffleCurriculum(ShuffleConfig(), 3, "0"), 3))
    assert ledger.num_issued() == 16
    assert audit(ledger) == []


@pytest.mark.parametrize("times", [1, 2])
def test_failing_group_reward_is_retried_and_reported(ledger, monkeypatch, times):
    monkeypatch.setattr(connected_source, "RETRY_DELAY", 0.0)
    asleep = Failure("JudgeError", "the judge sleeps", "system", True)

    async def main():
        core = await open_core(ledger, World(size=2), group_rewards=frozenset(["best"]))
        await core.issue_groups()
        for attempt in range(2):
            core.next_attempt(99)
            trace = make_trace(f"0.{attempt}", 0.0, (10, 11 + attempt))
            trace.rewards["best"] = None
            await core.record_attempt(0, attempt, [trace])
        client, failures = FlakyGroupReward([asleep] * times), []
        source = connect(client, max_tries=2, group_rewards=frozenset(["best"]))
        dispatcher = AttemptDispatcher(
            core,
            {"reverse": source},
            seed=0,
            get_limit=lambda: 0,
            on_group_scored=lambda *_: None,
            on_failure=lambda origin, failure: failures.append(failure.name),
        )
        await run_until_scored(core, dispatcher)
        assert failures == ["JudgeError"] * times
        return ledger.get_group(0)

    group = asyncio.run(main())
    if times == 1:
        assert group.state is GroupState.SCORED
    else:
        assert (group.reason, group.detail) == (DropReason.UNSCORED, "JudgeError: the judge sleeps")


class UnsupportedScorer:
    """A scorer whose model cannot score the rollouts, whatever they are."""

    async def score(self, group, traces, algorithm) -> None:
        raise ModelUnsupported("rollouts with images cannot be scored")


def test_rollouts_that_no_model_can_score_end_the_run(ledger):
    async def main():
        core = await open_core(ledger, World(size=2))
        await core.issue_groups()
        for attempt in range(2):
            core.next_attempt(99)
            await core.record_attempt(0, attempt, [make_trace(f"0.{attempt}", 0.0, (10, 11 + attempt))])
        dispatcher = AttemptDispatcher(
            core,
            {"reverse": connect(FlakyGroupReward([]))},
            seed=0,
            get_limit=lambda: 0,
            on_group_scored=lambda *_: None,
            on_failure=lambda *_: None,
            reference_scorer=UnsupportedScorer(),
        )
        async with asyncio.timeout(30):
            await dispatcher.run()

    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(main())
    assert [type(error) for error in ended.value.exceptions] == [ModelUnsupported]


def connect(client, *, max_tries: int = 1, group_rewards: frozenset[str] = frozenset()) -> ConnectedSource:
    """Return a source that is served by `client`."""
    return ConnectedSource(
        name="reverse",
        servers=client,
        tasks=TaskCache("reverse", client),
        attempt_timeout=9.0,
        max_tries=max_tries,
        server_timeout=9.0,
        group_rewards=group_rewards,
    )


async def run_until_scored(core: OrchestratorCore, dispatcher: AttemptDispatcher) -> None:
    """Run the dispatcher until every complete group is scored."""
    running = asyncio.create_task(dispatcher.run())
    async with asyncio.timeout(30):
        while core.get_groups_to_score() and not running.done():
            await asyncio.sleep(0.01)
    assert not running.done(), running.exception()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


class FailingGroupReward:
    """An env server whose group reward fails after the run has dropped all other groups."""

    def __init__(self, core: OrchestratorCore) -> None:
        self.core = core
        self.num_calls = 0

    async def score_group(self, task, traces, **_) -> None:
        self.num_calls += 1
        for number in self.core.get_groups_to_score()[1:]:
            await self.core.drop_group(number, DropReason.RUN_ENDED)
        raise RequestInvalid("it cannot")


def test_run_may_end_while_groups_of_an_earlier_process_are_scored(ledger):
    async def main():
        core = await open_core(ledger, World())
        await core.issue_groups()
        while (taken := core.next_attempt(99)) is not None:
            _, queued = taken
            await core.record_attempt(
                queued.group, queued.attempt, [make_trace(f"{queued.group}.{queued.attempt}", 1.0)]
            )
        assert len(core.get_groups_to_score()) > 1
        client = FailingGroupReward(core)
        source = connect(client, group_rewards=frozenset(["best"]))
        dispatcher = AttemptDispatcher(
            core,
            {name: replace(source, name=name) for name in TASKS},
            seed=0,
            get_limit=lambda: 0,
            on_group_scored=lambda *_: None,
            on_failure=lambda *_: None,
        )
        await run_until_scored(core, dispatcher)
        assert client.num_calls == 1
        assert {group.reason for group in ledger.groups()} == {DropReason.UNSCORED, DropReason.RUN_ENDED}

    asyncio.run(main())


class HeldEnvServer:
    """An env server that holds each request until the test releases it; a rollout, or the tasks, then fail."""

    def __init__(self, *, has_tasks: bool = True) -> None:
        self.has_tasks = has_tasks
        self.requests: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        self.address: str | None = None

    def find_address(self, rollout_id: str) -> str | None:
        return self.address

    async def hold(self) -> None:
        await self.requests.put(release := asyncio.Event())
        await release.wait()

    async def tasks(self, start, count, **_) -> TaskPage:
        await self.hold()
        if not self.has_tasks:
            raise RequestInvalid("it has none")
        return TaskPage([TaskItem(str(number), {"idx": number}) for number in range(count)], True)

    async def run(self, task, **_) -> None:
        self.address = "tcp://10.0.0.1:5000"
        try:
            await self.hold()
            raise RequestInvalid("it cannot")
        finally:
            self.address = None


@pytest.mark.parametrize("has_tasks", [True, False])
def test_oldest_attempt_says_where_it_is(ledger, monkeypatch, has_tasks):
    monkeypatch.setattr(connected_source, "RETRY_DELAY", 60.0)

    async def main() -> None:
        client, failed = HeldEnvServer(has_tasks=has_tasks), asyncio.Event()
        dispatcher = AttemptDispatcher(
            await open_core(ledger, World()),
            dict.fromkeys(TASKS, connect(client)),
            seed=0,
            get_limit=lambda: 1,
            on_group_scored=lambda *_: None,
            on_failure=lambda *_: failed.set(),
        )
        dispatcher.weights_ready.set()
        running = asyncio.create_task(dispatcher.run())
        async with asyncio.timeout(30):
            release = await client.requests.get()
            assert re.fullmatch(r"0\.0: 0 s \(timeout 9 s\), source \w+, not sent yet", describe_oldest(dispatcher))
            release.set()
            if has_tasks:  # otherwise it is never sent
                release = await client.requests.get()
                assert describe_oldest(dispatcher).endswith(" at tcp://10.0.0.1:5000")
                release.set()
            await failed.wait()
            assert describe_oldest(dispatcher).endswith(", failed with RequestInvalid")
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    def describe_oldest(dispatcher: AttemptDispatcher) -> str:
        return dispatcher.describe_oldest_attempt().removeprefix("oldest attempt ")

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["monitor", "enforce"])
def test_filter_rates_are_step_metrics(ledger, mode):
    async def main():
        core = await open_core(ledger, World())
        tables = [{"id": "gibberish"}, {"id": "zero_advantage", "mode": mode}]
        core.scoring_rules = replace(
            core.scoring_rules, filters=tuple(plugin.build_plugin("filter", table) for table in tables)
        )
        await core.issue_groups()
        attempts = [queued for _, queued in iter(lambda: core.next_attempt(99), None)]
        for queued in attempts:
            reward = 1.0 if queued.group == 0 else float(queued.attempt == 0)
            await core.record_attempt(
                queued.group, queued.attempt, [make_trace(f"{queued.group}.{queued.attempt}", reward)]
            )
        source = connect(FlakyGroupReward([]))
        progress = RunProgress(RunLog(ledger.store))
        dispatcher = AttemptDispatcher(
            core,
            dict.fromkeys(TASKS, source),
            seed=0,
            get_limit=lambda: 0,
            on_group_scored=progress.record_group,
            on_failure=progress.record_failure,
        )
        await run_until_scored(core, dispatcher)
        progress.record_batches({0: [0]})
        same = [queued for queued in attempts if queued.group == 0]
        assert progress.latest_metrics["rollouts"] == len(attempts) > len(same) == 2
        assert progress.latest_metrics["filter/zero_advantage"] == pytest.approx(len(same) / len(attempts))
        assert progress.latest_metrics["filter/gibberish"] == 0.0

    asyncio.run(main())
    assert ledger.get_group(0).state is (GroupState.DROPPED if mode == "enforce" else GroupState.BATCHED)
