"""What an eval consists of: the first n tasks of the taskset, r repetitions of each, and which of them are missing."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ramify.env import Task
from ramify.errors import ConfigInvalid, RamifyError
from ramify.errors.origin import describe_exception
from ramify.evals.config import EvalConfig
from ramify.evals.summary import make_rollout_id
from ramify.rollout import Environment
from ramify.store import RolloutRecord


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """One rollout to have: repetition `repetition` of the task called `key`."""

    task_key: str
    task: Task
    repetition: int

    @property
    def id(self) -> str:
        return make_rollout_id(self.task_key, self.repetition)

    def derive_seed(self, base_seed: int) -> int:
        """The rollout's own seed: the same on every start, another one for every pair."""
        digest = hashlib.sha256(f"{base_seed}:{self.task_key}:{self.repetition}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


def plan_rollouts(environment: Environment, config: EvalConfig) -> list[PlannedRollout]:
    """All pairs, task by task; ConfigInvalid for a task that cannot be run.

    A task that comes twice is two: the second is called `identity#2`.
    """
    times_seen: Counter[str] = Counter()
    rollouts: list[PlannedRollout] = []
    for task in load_first_tasks(environment, config.num_tasks):
        environment.check_task(task)
        times_seen[task.identity] += 1
        count = times_seen[task.identity]
        key = task.identity if count == 1 else f"{task.identity}#{count}"
        rollouts += [PlannedRollout(key, task, repetition) for repetition in range(config.repetitions)]
    return rollouts


def load_first_tasks(environment: Environment, count: int) -> list[Task]:
    """The first `count` tasks; ConfigInvalid if loading them raises, or if there are none."""
    name = environment.name
    try:
        tasks = list(islice(environment.iter_tasks(), count))
    except RamifyError as error:
        raise ConfigInvalid(f"taskset {name} cannot be loaded: {error.message}") from error
    except Exception as error:  # the environment's code may raise anything
        raise ConfigInvalid(f"taskset {name} cannot be loaded: load raised {describe_exception(error)}") from error
    if not tasks:
        raise ConfigInvalid(f"taskset {name} has no tasks")
    return tasks


def find_missing(rollouts: Sequence[PlannedRollout], rows: Mapping[str, RolloutRecord]) -> list[PlannedRollout]:
    """The pairs that no rollout fills, or one that the system failed."""
    return [pair for pair in rollouts if (row := rows.get(pair.id)) is None or row.failure is not None]
