"""Which task is next. Tasks are numbers here: what they are, only the environment knows.

A curriculum is a pure function of its seed and its state. The state is plain data by key; what a choice or a reward
changed of it (`changed`) is kept in the ledger together with the group. So a run that was killed goes on with the very
task that was next.
"""

from bisect import insort
from collections.abc import Mapping
from random import Random
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import Field, model_validator

from ramify.config import Config

NO_EPOCH = -1  # of a task that was chosen by a curriculum without epochs: the run may go on with one that has them


class TaskPick(NamedTuple):
    """A task, and how often all tasks were gone through before."""

    task: int
    epoch: int


class Curriculum(Protocol):
    """What chooses tasks."""

    has_epochs: bool
    """Whether every task is chosen once in each epoch, so that an audit may ask for it."""

    def next_task(self) -> TaskPick | None:
        """The next task; None when there is none left."""
        ...

    def record_reward(self, task: int, reward: float) -> None:
        """The mean reward of a group that tried the task."""
        ...

    def take_changes(self) -> dict[str, Any]:
        """Plain data by key: what is new since this was last asked."""
        ...

    def restore(self, saved_state: Mapping[str, Any]) -> None:
        """Go on from all that was ever `changed`, the last value of each key."""
        ...


class ShuffleConfig(Config):
    """Every task once in each epoch, in an order drawn from the seed."""

    type: Literal["shuffle"] = "shuffle"
    epochs: int | None = Field(default=None, ge=1)
    """How often all tasks are gone through; None is for ever."""


class PoolsConfig(Config):
    """Tasks in three pools by the rewards they earned of late: easy, normal, hard. New ones are normal."""

    type: Literal["pools"] = "pools"
    easy: float = Field(default=0.1, ge=0, le=1)
    """Share of the groups that try an easy task."""
    hard: float = Field(default=0.2, ge=0, le=1)
    """Share of the groups that try a hard task."""
    easy_above: float = 0.9
    """A task whose mean reward is above this is easy."""
    hard_below: float = 0.1
    """A task whose mean reward is below this is hard."""
    recent: int = Field(default=4, ge=1)
    """How many groups of a task its mean counts."""

    @model_validator(mode="after")
    def _shares_sum_to_at_most_one(self) -> "PoolsConfig":
        if self.easy + self.hard > 1:
            raise ValueError(f"easy and hard are shares of one whole, got {self.easy + self.hard:g}")
        if self.hard_below > self.easy_above:
            raise ValueError("hard_below must not be above easy_above")
        return self


def build_curriculum(config: ShuffleConfig | PoolsConfig, num_tasks: int | None, seed: str) -> Curriculum:
    """The curriculum of a source with so many tasks; None is as many as one asks for."""
    if isinstance(config, PoolsConfig):
        if num_tasks is None:
            raise ValueError("pools need a source whose tasks can be counted")
        return PoolsCurriculum(config, num_tasks, seed)
    return ShuffleCurriculum(config, num_tasks, seed)


class ShuffleCurriculum:
    """Every task once in each epoch. A source without end is taken in its own order, as one epoch."""

    def __init__(self, config: ShuffleConfig, num_tasks: int | None, seed: str) -> None:
        self._config, self._num_tasks, self._seed = config, num_tasks, seed
        self.has_epochs = num_tasks is not None
        self._epoch = self._position = 0
        self._order = self._draw_order(seed)

    def next_task(self) -> TaskPick | None:
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
        """All tasks come equally often, whatever they earn."""

    def take_changes(self) -> dict[str, Any]:
        return {"at": [self._epoch, self._position], "seed": self._order_seed}

    def restore(self, saved_state: Mapping[str, Any]) -> None:
        """An epoch that has begun ends in its own order, also where the seed is another by now."""
        self._epoch, self._position = saved_state.get("at", (0, 0))
        self._order = self._draw_order(saved_state.get("seed", self._seed))

    def _draw_order(self, seed: str) -> list[int]:
        self._order_seed = seed
        order = list(range(self._num_tasks or 0))
        Random(f"{seed}:{self._epoch}").shuffle(order)
        return order


class PoolsCurriculum:
    """Tasks drawn from pools of like difficulty, each pool as often as the config says (or as it has tasks at all)."""

    has_epochs = False

    def __init__(self, config: PoolsConfig, num_tasks: int, seed: str) -> None:
        self._config, self._num_tasks, self._seed = config, num_tasks, seed
        self._num_draws = 0
        self._rewards: dict[int, list[float]] = {}
        self._changes: dict[str, Any] = {}
        self._pools: dict[str, list[int]] = {"easy": [], "normal": list(range(num_tasks)), "hard": []}

    def next_task(self) -> TaskPick | None:
        config = self._config
        shares = {"easy": config.easy, "hard": config.hard, "normal": 1 - config.easy - config.hard}
        names = [name for name in shares if self._pools[name]]
        if not names:
            return None
        rng = Random(f"{self._seed}:{self._num_draws}")
        self._num_draws += 1
        self._changes["drawn"] = self._num_draws
        weights = [shares[name] for name in names]
        (name,) = rng.choices(names, weights if any(weights) else None)
        return TaskPick(rng.choice(self._pools[name]), NO_EPOCH)

    def record_reward(self, task: int, reward: float) -> None:
        if task >= self._num_tasks:
            return  # it was there when its group was issued
        self._set_rewards(task, [*self._rewards.get(task, []), reward][-self._config.recent :])
        self._changes[f"task/{task}"] = self._rewards[task]

    def get_pool(self, task: int) -> str:
        """How hard a task is: easy, normal or hard."""
        rewards = self._rewards.get(task)
        if not rewards:
            return "normal"
        mean = sum(rewards) / len(rewards)
        return "easy" if mean > self._config.easy_above else "hard" if mean < self._config.hard_below else "normal"

    def take_changes(self) -> dict[str, Any]:
        news, self._changes = self._changes, {}
        return news

    def restore(self, saved_state: Mapping[str, Any]) -> None:
        self._num_draws = saved_state.get("drawn", 0)
        for key, rewards in saved_state.items():
            if key.startswith("task/") and (task := int(key.removeprefix("task/"))) < self._num_tasks:
                self._set_rewards(task, list(rewards))

    def _set_rewards(self, task: int, rewards: list[float]) -> None:
        before = self.get_pool(task)
        self._rewards[task] = rewards
        after = self.get_pool(task)
        if before != after:
            self._pools[before].remove(task)
            insort(self._pools[after], task)
