"""A run without processes: random latencies, failures and restarts, and two things that always hold.

*Bound*: a group is trained at most `max_off_policy` steps after the version it started with, and so is each of its
attempts. *Liveness*: the run reaches its last step, and every group that was issued is trained once or dropped.
"""

import heapq
import os
from collections import Counter
from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.orchestrate.admission import AdmissionControl, AdmissionLimits
from ramify.orchestrate.attempt_queue import AttemptQueue, QueuedAttempt


@dataclass
class World:
    """How things go here; times are in the time of one step."""

    batch: int
    bound: int
    steps: int
    limit: int  # attempts out at once
    size: int  # attempts of a group
    slow: float  # share of the attempts that take 50 times as long
    failing: float  # share of the attempts that have to be run again
    dropping: float  # share of the groups that are dropped
    swap: float  # time until a version is applied
    interval: int  # steps between two checkpoints
    kills: float  # share of the steps after which the trainer dies
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
    swap=st.sampled_from([0.0, 0.1, 3.0]),
    interval=st.integers(1, 5),
    kills=st.sampled_from([0.0, 0.0, 0.3]),
    latency=st.sampled_from([0.01, 0.3, 4.0]),
    tasks=st.one_of(st.none(), st.integers(1, 40)),
    seed=st.integers(0, 2**32),
)


class Simulation:
    """Events on a clock that only the test has."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, Random(world.seed)
        self.shape = AdmissionLimits.from_max_staleness(world.batch, world.bound)
        self.admission = AdmissionControl(self.shape, max_steps=world.steps)
        self.dispatch = AttemptQueue()
        self.now, self.clock = 0.0, []
        self.events = 0
        self.issued = 0
        self.started: dict[int, int] = {}  # group: version at its issue
        self.sent: dict[int, list[int]] = {}  # group: versions at which its attempts were sent out
        self.left: dict[int, int] = {}  # group: attempts that are not back
        self.dropped: set[int] = set()
        self.batches: dict[int, tuple[int, ...]] = {}
        self.trained: dict[int, int] = {}
        self.version = self.committed = 0
        self.training = False
        self.overtaken = False
        self.incarnation = 0

    def later(self, delay: float, event, *about) -> None:
        self.events += 1
        heapq.heappush(self.clock, (self.now + delay, self.events, event, about))

    def run(self) -> None:
        self.settle()
        while self.clock and not self.over:
            self.now, _, event, about = heapq.heappop(self.clock)
            event(*about)
            self.settle()
            assert self.events < 200_000
        assert self.over, "nothing is on its way, and the run is not over"

    @property
    def over(self) -> bool:
        return self.admission.is_finished and self.version == self.admission.next_step

    def settle(self) -> None:
        """Everything that may be done now is done."""
        while self.admission.num_free_slots:
            if self.world.tasks is not None and self.issued == self.world.tasks:
                self.admission.exhausted = True
                break
            group, self.issued = self.issued, self.issued + 1
            self.admission.issue_group(group)
            self.started[group], self.sent[group], self.left[group] = (
                self.admission.applied_version,
                [],
                self.world.size,
            )
            for attempt in range(self.world.size):
                self.dispatch.push(group, attempt)
        assert self.admission.num_active <= self.shape.slots or self.incarnation
        while order := self.dispatch.pop(self.world.limit, self.admission.can_dispatch):
            self.sent[order.group].append(self.admission.applied_version)
            slow = 50 if self.rng.random() < self.world.slow else 1
            self.later(self.rng.expovariate(1) * self.world.latency * slow, self.back, order)
        while groups := self.admission.next_batch():
            self.overtaken |= any(group < groups[-1] for group in self.admission.get_blocking_groups())
            self.batches[self.admission.record_batch(groups)] = groups
        if not self.training and self.version in self.batches:
            self.training = True
            self.later(1.0, self.step_done, self.incarnation, self.version)

    def back(self, order: QueuedAttempt) -> None:
        self.dispatch.mark_done(order.group, order.attempt)
        if order.group in self.dropped:
            return
        if self.rng.random() < self.world.failing and order.again < 20:
            self.dispatch.push(order.group, order.attempt, order.again + 1)
            return
        self.left[order.group] -= 1
        if self.left[order.group]:
            return
        if self.rng.random() < self.world.dropping:
            self.dropped.add(order.group)
            self.admission.drop_group(order.group)
        else:
            self.admission.mark_scored(order.group)

    def step_done(self, incarnation: int, step: int) -> None:
        if incarnation != self.incarnation:
            return
        self.training = False
        for group in self.batches[step]:
            assert self.trained.setdefault(group, step) == step
            for version in (self.started[group], *self.sent[group]):
                assert step - version <= self.world.bound
        self.version = step + 1
        if self.version % self.world.interval == 0:
            self.committed = self.version
        if self.rng.random() < self.world.kills:
            self.incarnation += 1
            self.version = self.committed
            again = {step: groups for step, groups in self.batches.items() if step >= self.committed}
            self.admission.rewind(self.committed, again)
        else:
            self.later(self.rng.random() * self.world.swap, self.swapped, self.incarnation, self.version)

    def swapped(self, incarnation: int, version: int) -> None:
        if incarnation == self.incarnation:
            self.admission.apply_version(version)


@settings(max_examples=5000 if os.environ.get("RAMIFY_FULL") else 300)
@given(WORLDS)
def test_no_group_is_too_old_and_none_is_forgotten(world):
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


def test_the_worst_case_is_reached_so_the_bound_is_no_looser_than_it_says():
    found = 0
    for seed in range(60):
        world = World(4, 2, 14, 60, 1, 0.3, 0.0, 0.0, 0.0, 1, 0.0, 0.3, None, seed)
        run = Simulation(world)
        run.run()
        ages = [step - run.started[group] for group, step in run.trained.items()]
        found = max(found, *ages)
        if run.overtaken and found == world.bound:
            return
    raise AssertionError(f"the oldest group was {found} steps old, and 2 are allowed")


def test_slow_groups_are_trained_as_often_as_they_are_issued():
    world = World(4, 4, 14, 60, 1, 0.2, 0.0, 0.0, 0.0, 1, 0.0, 0.3, None, seed=3)
    run = Simulation(world)
    run.run()
    assert run.overtaken
    assert run.issued == len(run.trained) == 4 * 14
