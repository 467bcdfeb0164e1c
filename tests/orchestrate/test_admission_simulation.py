"""A simulated run with random latencies, failures and restarts, and two properties that always hold.

*Bound*: a group is trained at most `max_staleness` steps after the version it started with, and so is each of its
attempts. *Liveness*: the run reaches its last step, and every issued group is trained once or dropped.
"""

import heapq
import os
from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.orchestrate.admission import AdmissionControl, AdmissionLimits
from ramify.orchestrate.group_tracker import AttemptQueue, QueuedAttempt


@dataclass
class World:
    """Parameters of a simulation; times are in units of one training step."""

    batch: int
    bound: int
    steps: int
    limit: int  # attempts in flight
    size: int  # attempts per group
    slow: float  # fraction of the attempts that take 50 times as long
    failing: float  # fraction of the attempts that are retried
    dropping: float  # fraction of the groups that are dropped
    update_time: float  # time until a version is applied
    interval: int  # steps between checkpoints
    kills: float  # fraction of the steps after which the trainer dies
    latency: float
    tasks: int | None
    seed: int


WORLDS = st.builds(
    World,
    batch=st.integers(1, 9),
    bound=st.integers(0, 6),
    steps=st.integers(1, 14),
    limit=st.integers(1, 60),
    size=st.integers(1, 3),
    slow=st.sampled_from([0.0, 0.1, 0.5]),
    failing=st.sampled_from([0.0, 0.2, 0.6]),
    dropping=st.sampled_from([0.0, 0.2, 0.7]),
    update_time=st.sampled_from([0.0, 0.1, 3.0]),
    interval=st.integers(1, 5),
    kills=st.sampled_from([0.0, 0.0, 0.3]),
    latency=st.sampled_from([0.01, 0.3, 4.0]),
    tasks=st.one_of(st.none(), st.integers(1, 40)),
    seed=st.integers(0, 2**32),
)


class Simulation:
    """A run driven by events on a simulated clock."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, Random(world.seed)
        self.limits = AdmissionLimits.from_max_staleness(world.batch, world.bound)
        self.admission = AdmissionControl(self.limits, world.steps)
        self.queue = AttemptQueue()
        self.now, self.clock = 0.0, []
        self.events = 0
        self.issued = 0
        self.started: dict[int, int] = {}  # version at which a group was issued
        self.dispatched: dict[int, list[int]] = {}  # versions at which the attempts of a group were dispatched
        self.pending: dict[int, int] = {}  # attempts of a group without a result
        self.retries: Counter[QueuedAttempt] = Counter()
        self.dropped: set[int] = set()
        self.batches: dict[int, tuple[int, ...]] = {}
        self.trained: dict[int, int] = {}
        self.version = self.committed = 0
        self.training = False
        self.overtaken = False
        self.incarnation = 0

    def schedule(self, delay: float, event, *args) -> None:
        self.events += 1
        heapq.heappush(self.clock, (self.now + delay, self.events, event, args))

    def run(self) -> None:
        self.advance()
        while self.clock and not self.is_over:
            self.now, _, event, args = heapq.heappop(self.clock)
            event(*args)
            self.advance()
            assert self.events < 200_000
        assert self.is_over, "no event is pending, and the run is not over"

    @property
    def is_over(self) -> bool:
        return self.admission.is_finished and self.version == self.admission.next_step

    def advance(self) -> None:
        """Do everything that can be done now."""
        while self.admission.num_free_slots:
            if self.world.tasks is not None and self.issued == self.world.tasks:
                self.admission.exhausted = True
                break
            group, self.issued = self.issued, self.issued + 1
            self.admission.issue_group(group)
            self.started[group], self.dispatched[group] = self.admission.applied_version, []
            self.pending[group] = self.world.size
            for attempt in range(self.world.size):
                self.queue.push(group, attempt)
        assert self.admission.num_active <= self.limits.slots or self.incarnation
        while queued := self.queue.pop(self.world.limit, self.admission.can_dispatch):
            self.dispatched[queued.group].append(self.admission.applied_version)
            slow = 50 if self.rng.random() < self.world.slow else 1
            self.schedule(self.rng.expovariate(1) * self.world.latency * slow, self.finish_attempt, queued)
        while groups := self.admission.next_batch():
            self.overtaken |= any(group < groups[-1] for group in self.admission.get_blocking_groups())
            self.batches[self.admission.record_batch(groups)] = groups
        if not self.training and self.version in self.batches:
            self.training = True
            self.schedule(1.0, self.finish_step, self.incarnation, self.version)

    def finish_attempt(self, queued: QueuedAttempt) -> None:
        self.queue.mark_done(queued.group, queued.attempt)
        if queued.group in self.dropped:
            return
        if self.rng.random() < self.world.failing and self.retries[queued] < 20:
            self.retries[queued] += 1
            self.queue.push(queued.group, queued.attempt, is_retry=True)
            return
        self.pending[queued.group] -= 1
        if self.pending[queued.group]:
            return
        if self.rng.random() < self.world.dropping:
            self.dropped.add(queued.group)
            self.admission.drop_group(queued.group)
        else:
            self.admission.mark_scored(queued.group)

    def finish_step(self, incarnation: int, step: int) -> None:
        if incarnation != self.incarnation:
            return
        self.training = False
        for group in self.batches[step]:
            assert self.trained.setdefault(group, step) == step
            for version in (self.started[group], *self.dispatched[group]):
                assert step - version <= self.world.bound
        self.version = step + 1
        if self.version % self.world.interval == 0:
            self.committed = self.version
        if self.rng.random() < self.world.kills:
            self.incarnation += 1
            self.version = self.committed
            batches = {step: groups for step, groups in self.batches.items() if step >= self.committed}
            self.admission.rewind(self.committed, batches)
        else:
            self.schedule(
                self.rng.random() * self.world.update_time, self.finish_update, self.incarnation, self.version
            )

    def finish_update(self, incarnation: int, version: int) -> None:
        if incarnation == self.incarnation:
            self.admission.apply_version(version)


@pytest.mark.promise
@settings(max_examples=5000 if os.environ.get("RAMIFY_FULL") else 60)
@given(WORLDS)
def test_staleness_is_bounded_and_no_group_is_lost(world):
    run = Simulation(world)
    run.run()
    counts = Counter(group for groups in run.batches.values() for group in groups)
    assert set(counts.values()) <= {1}
    assert counts.keys() == run.trained.keys()
    assert counts.keys() | run.dropped == set(range(run.issued))
    assert not counts.keys() & run.dropped
    sizes = [len(run.batches[step]) for step in range(len(run.batches))]
    assert all(size == world.batch for size in sizes[:-1])
    assert len(sizes) == world.steps or world.tasks is not None


def test_staleness_bound_is_tight():
    max_staleness = 0
    for seed in range(60):
        world = World(4, 2, 14, 60, 1, 0.3, 0.0, 0.0, 0.0, 1, 0.0, 0.3, None, seed)
        run = Simulation(world)
        run.run()
        staleness = [step - run.started[group] for group, step in run.trained.items()]
        max_staleness = max(max_staleness, *staleness)
        if run.overtaken and max_staleness == world.bound:
            return
    raise AssertionError(f"the maximum staleness was {max_staleness}, and 2 is allowed")
