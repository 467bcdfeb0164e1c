"""A whole run without processes, killed at any write: it resumes, and no group is lost or trained twice."""

import asyncio
import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.core.errors import ConfigInvalid, DataCorrupt, Failure, OperationInvalid
from ramify.env import plugin
from ramify.orchestrate.admission import AdmissionLimits
from ramify.orchestrate.algorithms import Algorithm, AlgorithmConfig, annotate_advantage
from ramify.orchestrate.batches import rebuild_forests
from ramify.orchestrate.core import OrchestratorCore
from ramify.orchestrate.curriculum import (
    Curriculum,
    DifficultyConfig,
    DifficultyCurriculum,
    ShuffleConfig,
    ShuffleCurriculum,
    SourceMix,
)
from ramify.orchestrate.group_scoring import ScoringRules
from ramify.orchestrate.group_tracker import GroupProgress
from ramify.orchestrate.reference_scores import NodeScore
from ramify.run.store import RunStore
from ramify.run.store.audit import audit
from ramify.run.store.group_state import DropReason, GroupState
from ramify.run.store.ledger import Ledger
from ramify.trace.annotation import TOP_DTYPE
from ramify.view.training_record import check_trained_tokens
from tests.support.orchestrator import (
    DIED,
    MEMORY,
    TASKS,
    Killed,
    KilledLedger,
    World,
    make_commit,
    open_core,
    record_all,
    sample_group,
    sources,
    take_attempts,
)
from tests.support.traces import make_trace, refuse_top_logprobs


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


@pytest.mark.promise
def test_run_ends_with_every_group_trained_or_dropped():
    run(World(steps=6))


@pytest.mark.promise
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


@pytest.mark.promise
@pytest.mark.parametrize("fewer", [{"bound": 0}, {"batch": 1}, {"batch": 1, "bound": 0}])
async def test_run_resumes_with_fewer_slots_than_groups(ledger, fewer):
    """The limits may change between starts: groups in flight are trained all the same."""
    world, rng = World(steps=3, batch=3, bound=3), Random(0)

    core = await open_core(ledger, world)
    await core.issue_groups()
    smaller = replace(world, **fewer)
    assert ledger.num_issued() > AdmissionLimits.from_max_staleness(smaller.batch, smaller.bound).slots
    await open_and_drive(ledger, smaller, rng)
    assert audit(ledger) == []
    assert ledger.progress().committed == world.steps


async def test_only_pending_attempts_are_queued_after_a_restart(ledger):
    core = await open_core(ledger, World(size=3))
    (first, *_) = await core.issue_groups()
    assert first.size == 3
    taken = [core.next_attempt(99)[1] for _ in range(3)]
    await core.record_attempt(0, taken[1].attempt, [make_trace("0.1", 1.0)])
    restarted = await open_core(ledger, World(size=3))
    sent = [(queued.group, queued.attempt) for queued in take_attempts(restarted)]
    assert (0, 1) not in sent
    assert sent[:2] == [(0, 0), (0, 2)]
    assert len(sent) == sum(group.size for group in ledger.groups()) - 1


async def test_missing_group_reward_drops_the_group_with_its_name(ledger):
    core = await open_core(ledger, World(), group_rewards=frozenset({"ranked"}))
    await sample_group(core, 0, ranked=None)
    assert (await core.score_group(0)).batch_group is None
    group = ledger.get_group(0)
    assert (group.reason, group.detail) == (DropReason.UNSCORED, "ranked")


async def test_group_rewards_are_stored_with_the_traces(ledger):
    core = await open_core(ledger, World(), group_rewards=frozenset({"ranked"}))
    await sample_group(core, 0, rewards=(0.0, 0.0), ranked=None)
    for place, trace in enumerate(core.get_traces(0)):
        trace.rewards["ranked"] = (float(place), 1.0)
    assert (await core.score_group(0, {0: {}, 1: {"ranked": 1}})).batch_group is not None
    assert ledger.store.read_traces("0.1")[0].reward == 1.0
    (row,) = ledger.store.rollouts(id="0.1")
    assert (row.reward, row.summary) == (1.0, {"ranked": 1})
    assert ledger.attempts(0)[1].notes["advantage"] > 0


async def test_scores_of_a_teacher_survive_a_restart_and_move_into_the_batch(ledger):
    world, opd = World(size=2, batch=1), plugin.build_plugin("algorithm", {"id": "opd"})
    scores = {(f"0.{attempt}", 1): NodeScore(np.array([-0.25, -1.5 - attempt], np.float32)) for attempt in range(2)}

    core = await open_core(ledger, world, algorithm=opd)
    await sample_group(core, 0)
    assert (await core.score_group(0, reference_scores=scores)).batch_group is not None
    assert ledger.get_reference_scores(0) is not None
    restarted = await open_core(ledger, world, algorithm=opd)
    assert restarted.get_groups_to_score() == []
    (batch,) = await restarted.form_batches()
    (forest,) = rebuild_forests(batch, ledger.store.read_traces, refuse_top_logprobs)
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


async def test_a_state_may_become_empty_again(ledger):
    algorithm = Alternate()
    core = await open_core(ledger, World(size=2, batch=4), algorithm=algorithm)
    groups, states_by_source = await core.issue_groups(), {}
    await record_all(core)
    for group in groups:
        await core.score_group(group.number)
        states_by_source.setdefault(group.source, []).append(algorithm.states[group.number])
    assert states_by_source["reverse"][:3] == [{}, {"odd": True}, {}]


async def test_likeliest_tokens_of_a_teacher_are_in_a_file_and_survive_a_restart(ledger, tmp_path):
    """They are written before the group counts as scored, and no byte of them is in the database."""
    world, opd = World(size=2, batch=1), plugin.build_plugin("algorithm", {"id": "opd", "top_k": 3})
    top = np.zeros((2, 3), TOP_DTYPE)
    top["token"], top["logprob"] = [[7, 8, 9], [1, 2, 3]], [[-0.5, -1.5, -2.5], [-0.25, -2.0, -3.0]]
    scores = {(f"0.{attempt}", 1): NodeScore(np.array([-0.5, -1.5], np.float32), top) for attempt in range(2)}

    core = await open_core(ledger, world, algorithm=opd)
    await sample_group(core, 0)
    await core.score_group(0, reference_scores=scores)
    assert len(ledger.get_reference_scores(0)) < 100
    file = tmp_path / "top_logprobs" / "0.bin"
    file.rename(tmp_path / "moved")
    with pytest.raises(DataCorrupt, match=r"0\.bin: .* cannot be read"):
        await (await open_core(ledger, world, algorithm=opd)).form_batches()
    (tmp_path / "moved").rename(file)
    core = await open_core(ledger, world, algorithm=opd)
    (batch,) = await core.form_batches()
    restarted = await open_core(ledger, world, algorithm=opd)
    for forests in (core.get_forests(batch), restarted.get_forests(batch)):
        (forest,) = forests
        assert forest.targets.ref_top.tolist() == [*top.tolist(), *top.tolist()]
    check = check_trained_tokens(ledger.store)
    assert (check.num_entries, check.problems) == (4, [])
    with pytest.raises(DataCorrupt, match=r"group 0 has no likeliest tokens of node 1 of trace 0\.0"):
        rebuild_forests(batch, ledger.store.read_traces, lambda number: {})
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataCorrupt, match=r"0\.bin: .* the checksum does not match"):
        restarted.get_forests(batch)
    file.unlink()
    with pytest.raises(DataCorrupt, match="cannot be read"):
        restarted.get_forests(batch)


async def test_dropped_group_leaves_no_file_of_likeliest_tokens(ledger, tmp_path):
    opd, bad = plugin.build_plugin("algorithm", {"id": "opd", "top_k": 1}), np.zeros((2, 1), TOP_DTYPE)
    scores = {(f"0.{attempt}", 1): NodeScore(np.full(2, np.nan, np.float32), bad) for attempt in range(2)}
    core = await open_core(ledger, World(size=2, batch=1), algorithm=opd)
    await sample_group(core, 0)
    assert (await core.score_group(0, reference_scores=scores)).batch_group is None
    assert list((tmp_path / "top_logprobs").iterdir()) == []


async def test_group_without_its_scores_is_dropped(ledger):
    algorithm = plugin.build_plugin("algorithm", {"id": "grpo", "beta": 0.1})
    core = await open_core(ledger, World(size=2, batch=1), algorithm=algorithm)
    await sample_group(core, 0)
    assert (await core.score_group(0)).batch_group is None
    group = ledger.get_group(0)
    assert group.reason is DropReason.NOT_FINITE and "no finite reference logprob" in group.detail


async def test_dropped_attempt_drops_a_group_with_too_few_left(ledger):
    core = await open_core(ledger, World(size=2))
    await core.issue_groups()
    core.next_attempt(9), core.next_attempt(9)
    failures = [await core.record_failure(0, 0, DIED) for _ in range(2)]
    assert core.attempt_queue.num_in_flight == 0
    assert [*failures, await core.record_attempt(0, 1, [make_trace("0.1", 1.0)])] == [
        GroupProgress.OPEN,
        GroupProgress.TOO_FEW,
        GroupProgress.TOO_FEW,
    ]
    group = ledger.get_group(0)
    assert (group.reason, group.detail) == (DropReason.TOO_FEW, "1 of 2 attempts failed: ProcessDied")


async def test_concurrent_calls_take_turns(ledger):
    """Attempts that come back together complete their group once; batches are cut once; dropped groups stay dropped."""
    core = await open_core(ledger, World(batch=3, bound=3, steps=4))
    issued = await asyncio.gather(core.issue_groups(), core.issue_groups())
    assert sorted(group.number for groups in issued for group in groups) == list(range(core.admission.num_active))

    async def come_back(queued):
        if queued.group == 0:
            failure = Failure("EngineIncompatible", "no token ids", "system", False)
            return queued.group, await core.record_failure(queued.group, queued.attempt, failure)
        trace = make_trace(f"{queued.group}.{queued.attempt}", float(queued.attempt))
        return queued.group, await core.record_attempt(queued.group, queued.attempt, [trace])

    outcomes = await asyncio.gather(*map(come_back, take_attempts(core)))
    complete = [group for group, progress in outcomes if progress is GroupProgress.COMPLETE]
    assert sorted(complete) == list(range(1, core.admission.num_active + 1))
    assert [progress for group, progress in outcomes if group == 0] == [GroupProgress.TOO_FEW] * 2
    await asyncio.gather(*(core.score_group(group) for group in (*complete, *complete, 0)))
    batches = [batch for cut in await asyncio.gather(core.form_batches(), core.form_batches()) for batch in cut]
    assert [batch.step for batch in batches] == list(range(len(batches)))
    assert len(batches) > 1
    assert audit(ledger, finished=False) == []


async def test_version_of_an_earlier_incarnation_frees_no_slot(ledger):
    core = await open_core(ledger, World())
    replaced, newest = await core.register_trainer(), await core.register_trainer()
    core.record_applied_version(replaced.incarnation, 3)
    assert core.admission.applied_version == 0
    core.record_applied_version(newest.incarnation, 3)
    assert core.admission.applied_version == 3


async def test_run_cannot_finish_before_its_last_batch(ledger):
    core = await open_core(ledger, World())
    with pytest.raises(OperationInvalid, match="batch 0 is not formed yet"):
        await core.drop_open_groups()


@pytest.mark.parametrize("count", [2, 5])
async def test_changed_task_count_is_refused_within_an_epoch(ledger, monkeypatch, count):
    await (await open_core(ledger, World())).issue_groups()
    monkeypatch.setitem(TASKS, "reverse", count)
    with pytest.raises(ConfigInvalid, match=f"reverse: its taskset has {count} tasks, but the run was started with 3"):
        await open_core(ledger, World())


async def test_run_may_resume_with_a_curriculum_that_has_epochs(ledger):
    """Tasks that were chosen without epochs belong to no epoch."""
    (source, *_), rules = sources(World()).values(), ScoringRules(1000, seq_len=64, filters=())

    async def issue(curriculum: Curriculum, tasks_per_epoch: int | None) -> None:
        mix = SourceMix({source.name: 1.0}, {source.name: curriculum})
        specs = {source.name: replace(source, tasks_per_epoch=tasks_per_epoch)}
        core = await OrchestratorCore.open(ledger, mix, specs, rules, AdmissionLimits.from_max_staleness(4, 0), 100)
        for _ in range(2):
            for group in await core.issue_groups():
                await core.drop_group(group.number, DropReason.CANCELLED)

    await issue(DifficultyCurriculum(DifficultyConfig(), 3, "0"), None)
    await issue(ShuffleCurriculum(ShuffleConfig(), 3, "0"), 3)
    assert ledger.num_issued() == 16
    assert audit(ledger) == []
