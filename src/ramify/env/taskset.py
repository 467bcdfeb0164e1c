"""A taskset yields tasks and defines how attempts at them are set up, stopped and scored.

A user writes a subclass. `load` is the only required method. All others are optional hooks, recognized by their name
(`setup`, `finalize`, `tools`, `user`, `validate`, `gold`) or by their decorator (`@reward`, `@group_reward`, `@metric`,
`@stop`, `@tool`). A hook takes what it names, see `ramify.env.hook`.
"""

from collections.abc import Iterable
from typing import ClassVar, Literal

from ramify.config import Config
from ramify.env.plugin_config import get_config_class
from ramify.env.task import Task


class TasksetConfig(Config):
    """Configuration common to all tasksets. A taskset with more options annotates `config` with a subclass."""

    id: str = ""
    """The id that selects the taskset; see `ramify.env.plugin`."""
    split: Literal["train", "eval"] = "train"
    """Which tasks to load, for tasksets that distinguish them."""


class Taskset:
    """Base class of tasksets: `load` yields the tasks, hooks define everything else."""

    config: TasksetConfig
    task_type: ClassVar[type[Task]] = Task
    """The class of its tasks, used to decode tasks that come from another process."""

    def __init__(self, config: TasksetConfig | None = None) -> None:
        self.config = get_config_class(type(self), TasksetConfig)() if config is None else config

    def load(self) -> Iterable[Task]:
        """Return the tasks, in an order that depends only on the config. The iterable may be infinite."""
        raise NotImplementedError(f"{type(self).__name__} has no load()")
