"""Curricula choose the next task of a source, and a mix chooses the source. Tasks are represented by their numbers.

A curriculum is a pure function of its seed and its state. The state is plain data by key; what a choice or a reward
changed in it (`take_changes`) is stored in the ledger together with the group. So a run that was killed resumes with
the very task that was next.
"""

from bisect import insort
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from ramify.core.config import Config
from ramify.core.errors import ConfigInvalid

NO_EPOCH = -1  # epoch of tasks chosen without epochs; a resumed run may use a curriculum that has them


class TaskPick(NamedTuple):
    """A task, and the number of epochs before it."""

    task: int
    epoch: int


class ShuffleConfig(Config):
    """Every task once per epoch, in an order drawn from the seed."""

    type: Literal["shuffle"] = "shuffle"
    epochs: int | None = Field(default=None, ge=1)
    """Number of epochs. None: unlimited."""


class DifficultyConfig(Config):
    """Easy, normal and hard tasks, by their recent rewards, in configured fractions. New tasks are normal."""

    type: Literal["difficulty"] = "difficulty"
    easy_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the groups that try an easy task."""
    hard_fraction: float = Field(default=0.2, ge=0, le=1)
    """Fraction of the groups that try a hard task."""
    easy_above: float = 0.9
    """A task whose mean reward is above this is easy."""
    hard_below: float = 0.1
    """A task whose mean reward is below this is hard."""
    recent_groups: int = Field(default=4, ge=1)
    """Number of latest groups of a task that its mean reward covers."""

    @model_validator(mode="after")
    def _fractions_sum_to_at_most_one(self) -> "DifficultyConfig":
        if (total := self.easy_fraction + self.hard_fraction) > 1:
            raise ValueError(f"easy_fraction + hard_fraction must be at most 1, got {total:g}")
        if self.hard_below > self.easy_above:
            raise ValueError("hard_below must not be above easy_above")
        return self


class ShuffleCurriculum:
    """Chooses every task once per epoch. The tasks of an unbounded source are taken in order, as one epoch."""

    def __init__(self, config: ShuffleConfig, num_tasks: int | None, seed: str) -> None:
        self._config, self._num_tasks, self._seed = config, num_tasks, seed
        self._epoch = self._position = 0
        self._order = self._draw_order(seed)

    def next_task(self) -> TaskPick | None:
        """Return the next task in the order of the epoch; None after the last epoch."""
        if self._num_tasks is None:
            self._position += 1
            return TaskPick(self._position - 1, 0)
        if self._position == self._num_tasks:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._draw_order(self._seed)
        if self._num_tasks == 0 or self._epoch == self._config.epochs:
            return None
        self._position += 1
        return TaskPick(self._order[self._position - 1], self._epoch)

    def record_reward(self, task: int, reward: float) -> None:
        """Do nothing: all tasks are equally frequent, whatever their rewards."""

    def take_changes(self) -> dict[str, Any]:
        """Return the state that changed since the last call, by key: the position in the order of tasks."""
        return {"at": [self._epoch, self._position], "seed": self._order_seed}

    def restore(self, saved_state: Mapping[str, Any]) -> None:
        """Restore the position; an epoch that was started keeps its order even if the seed has changed."""
        self._epoch, self._position = saved_state.get("at", (0, 0))
        self._order = self._draw_order(saved_state.get("seed", self._seed))

    def _draw_order(self, seed: str) -> list[int]:
        self._order_seed = seed
        order = list(range(self._num_tasks or 0))
        Random(f"{seed}:{self._epoch}").shuffle(order)
        return order


class DifficultyCurriculum:
    """Draws easy, normal and hard tasks with the configured frequencies; a difficulty without tasks is skipped."""

    def __init__(self, config: DifficultyConfig, num_tasks: int, seed: str) -> None:
        self._config, self._num_tasks, self._seed = config, num_tasks, seed
        self._num_draws = 0
        self._rewards: dict[int, list[float]] = {}
        self._changes: dict[str, Any] = {}
        self._tasks_by_difficulty: dict[str, list[int]] = {"easy": [], "normal": list(range(num_tasks)), "hard": []}

    def next_task(self) -> TaskPick | None:
        """Draw a task: first its difficulty by the configured shares, then a task of that difficulty."""
        config = self._config
        fractions = {
            "easy": config.easy_fraction,
            "hard": config.hard_fraction,
            "normal": 1 - config.easy_fraction - config.hard_fraction,
        }
        names = [name for name in fractions if self._tasks_by_difficulty[name]]
        if not names:
            return None
        rng = Random(f"{self._seed}:{self._num_draws}")
        self._num_draws += 1
        self._changes["drawn"] = self._num_draws
        weights = [fractions[name] for name in names]
        (name,) = rng.choices(names, weights if any(weights) else None)
        return TaskPick(rng.choice(self._tasks_by_difficulty[name]), NO_EPOCH)

    def record_reward(self, task: int, reward: float) -> None:
        """Record the mean reward of a group of the task, and update the task's difficulty."""
        if task >= self._num_tasks:
            return  # the task was removed after its group was issued
        self._set_rewards(task, [*self._rewards.get(task, []), reward][-self._config.recent_groups :])
        self._changes[f"task/{task}"] = self._rewards[task]

    def get_difficulty(self, task: int) -> str:
        """Return the difficulty of a task: easy, normal or hard."""
        rewards = self._rewards.get(task)
        if not rewards:
            return "normal"
        mean = sum(rewards) / len(rewards)
        return "easy" if mean > self._config.easy_above else "hard" if mean < self._config.hard_below else "normal"

    def take_changes(self) -> dict[str, Any]:
        """Return the state that changed since the last call, by key, as plain data."""
        changes, self._changes = self._changes, {}
        return changes

    def restore(self, saved_state: Mapping[str, Any]) -> None:
        """Restore the number of draws and the recorded rewards."""
        self._num_draws = saved_state.get("drawn", 0)
        for key, rewards in saved_state.items():
            if key.startswith("task/") and (task := int(key.removeprefix("task/"))) < self._num_tasks:
                self._set_rewards(task, list(rewards))

    def _set_rewards(self, task: int, rewards: list[float]) -> None:
        before = self.get_difficulty(task)
        self._rewards[task] = rewards
        after = self.get_difficulty(task)
        if before != after:
            self._tasks_by_difficulty[before].remove(task)
            insort(self._tasks_by_difficulty[after], task)


Curriculum = ShuffleCurriculum | DifficultyCurriculum


def build_curriculum(config: ShuffleConfig | DifficultyConfig, num_tasks: int | None, seed: str) -> Curriculum:
    """Build the curriculum of a source; `num_tasks` is None if the source is unbounded."""
    if isinstance(config, DifficultyConfig):
        if num_tasks is None:
            raise ConfigInvalid(
                "train: the difficulty curriculum needs a source with a bounded number of tasks; use type = 'shuffle'"
            )
        return DifficultyCurriculum(config, num_tasks, seed)
    return ShuffleCurriculum(config, num_tasks, seed)


COUNT_KEY_PREFIX = "mix/"  # of the ledger keys for the number of groups issued per source


class TaskChoice(NamedTuple):
    """A task of a source, and the state that changed with the choice, to be stored with the group."""

    source: str
    task: int
    epoch: int
    state_updates: dict[str, Any]


class SourceMix:
    """The train sources, each with a weight and a curriculum. The source that is furthest behind its share is next.

    So weights of 3 and 1 hold over four groups as over four thousand, and a resumed run makes the same choices.
    """

    def __init__(self, weights: Mapping[str, float], curricula: Mapping[str, Curriculum]) -> None:
        self._weights, self._curricula = dict(weights), dict(curricula)
        self._issued_counts = dict.fromkeys(weights, 0)
        self._exhausted: set[str] = set()

    def next_task(self) -> TaskChoice | None:
        """Return the next task; None if all sources are exhausted."""
        while names := [name for name in self._weights if name not in self._exhausted]:
            name = min(names, key=lambda name: (self._issued_counts[name] + 0.5) / self._weights[name])
            pick = self._curricula[name].next_task()
            if pick is None:
                self._exhausted.add(name)
                continue
            self._issued_counts[name] += 1
            count = {f"{COUNT_KEY_PREFIX}{name}": self._issued_counts[name]}
            return TaskChoice(name, pick.task, pick.epoch, {**count, **self._take_changes(name)})
        return None

    def record_reward(self, source: str, task: int, reward: float) -> dict[str, Any]:
        """Tell a curriculum the mean reward of a group, and return the state that changed."""
        self._curricula[source].record_reward(task, reward)
        return self._take_changes(source)

    def restore(self, read_state: Callable[[str], Mapping[str, Any]]) -> None:
        """Restore the state; `read_state(prefix)` returns the stored values by key, without the prefix."""
        counts = read_state(COUNT_KEY_PREFIX)
        self._issued_counts |= {name: count for name, count in counts.items() if name in self._issued_counts}
        for name, curriculum in self._curricula.items():
            curriculum.restore(read_state(f"source/{name}/"))

    def _take_changes(self, source: str) -> dict[str, Any]:
        return {f"source/{source}/{key}": value for key, value in self._curricula[source].take_changes().items()}
