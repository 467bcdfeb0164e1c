"""The core of an orchestrator without processes, on two sources: how tests open it, and what they report to it."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from ramify.core.errors import Failure
from ramify.env import plugin
from ramify.orchestrate.admission import AdmissionLimits
from ramify.orchestrate.core import OrchestratorCore
from ramify.orchestrate.curriculum import ShuffleConfig, ShuffleCurriculum, SourceMix
from ramify.orchestrate.group_scoring import ScoringRules, SourceSpec
from ramify.orchestrate.group_tracker import QueuedAttempt
from ramify.run.store.ledger import CommitRecord, GroupRecord, Ledger
from ramify.trace.version import PolicyVersion
from tests.support.traces import make_trace

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where a sync costs nothing
TASKS = {"reverse": 3, "wordle": 4}
DIED = Failure("ProcessDied", "exit code -9", "system", True)


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
    repeat_rate: float = 0.0  # of results that arrive once more, from an env server that nobody waits for any more
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


def take_attempts(core: OrchestratorCore) -> list[QueuedAttempt]:
    """Take all attempts that wait in the queue."""
    return [queued for _, queued in iter(lambda: core.next_attempt(99), None)]


async def record_all(core: OrchestratorCore) -> None:
    """Record every attempt that waits; the second attempt of a group is better than the first."""
    for queued in take_attempts(core):
        trace = make_trace(f"{queued.group}.{queued.attempt}", float(queued.attempt))
        await core.record_attempt(queued.group, queued.attempt, [trace])


async def sample_group(core: OrchestratorCore, number: int, *, rewards=(0.0, 1.0), **missing: None) -> None:
    """Issue groups, and record the attempts of one of them; `missing` are rewards that are not known yet."""
    await core.issue_groups()
    for queued in take_attempts(core):
        if queued.group == number:
            trace = make_trace(f"{number}.{queued.attempt}", rewards[queued.attempt], (10, 11 + queued.attempt))
            trace.rewards.update(missing)
            await core.record_attempt(number, queued.attempt, [trace])


class FakeEngines:
    """An inference client whose updates finish while `may_finish` is set."""

    def __init__(self) -> None:
        self.updates: list[int] = []
        self.versions = {"http://engine": PolicyVersion("served at the start")}
        self.failures: list[Exception] = []
        self.may_finish = asyncio.Event()
        self.called = asyncio.Event()
        self.may_finish.set()

    async def update_weights(self, path: Path, version: PolicyVersion, *, run: str = "") -> dict[str, float]:
        self.updates.append(version.step)
        self.called.set()
        await self.may_finish.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.versions = dict.fromkeys(self.versions, version)
        return {"http://engine": 0.1}

    @property
    def versions_of_copying_engines(self) -> dict[str, PolicyVersion]:
        return self.versions
