"""A taskset: where tasks come from, and everything that is to be said about an attempt at one.

A user writes a subclass. `load` is the one method it must have. The rest are hooks it may have, found by their name
(`setup`, `finalize`, `tools`, `user`, `validate`, `gold`) or by their decorator (`@reward`, `@group_reward`, `@metric`,
`@stop`, `@tool`). A hook takes what it names, see `ramify.env.hook`.
"""

from collections.abc import Iterable
from typing import ClassVar, Literal

from ramify.config import Config
from ramify.env.plugin_config import get_config_class
from ramify.env.task import Task


class TasksetConfig(Config):
    """What every taskset can be told; a taskset with more to say annotates `config` with a subclass."""

    id: str = ""
    split: Literal["train", "eval"] = "train"


class Taskset:
    """Tasks and how they are judged."""

    config: TasksetConfig
    task_type: ClassVar[type[Task]] = Task
    """The class its tasks are read back into where they come from another process."""

    def __init__(self, config: TasksetConfig | None = None) -> None:
        self.config = get_config_class(type(self), TasksetConfig)() if config is None else config

    def load(self) -> Iterable[Task]:
        """The tasks, in an order that depends on the config alone; there may be no end to them."""
        raise NotImplementedError(f"{type(self).__name__} has no load()")
