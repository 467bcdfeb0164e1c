"""A taskset yields tasks and defines how attempts at them are set up, stopped and scored.

A user writes a subclass. `load` is the only required method. All others are optional hooks, recognized by their name
(`setup`, `finalize`, `tools`, `user`, `run_agent`, `validate`, `gold`) or by their decorator (`@reward`,
`@group_reward`, `@metric`, `@stop`, `@tool`). A hook takes what it names, see `ramify.env.hook`.
"""

from collections.abc import Iterable
from typing import ClassVar, Literal

from ramify.core.config import Config
from ramify.env.plugin import get_config_class
from ramify.env.task import Task


class TasksetConfig(Config):
    """Configuration common to all tasksets. A taskset with more options annotates `config` with a subclass.

    - `id`: the id that selects the taskset.
    - `split`: which tasks to load, "train" or "eval", for tasksets that distinguish them.
    """

    id: str = ""
    split: Literal["train", "eval"] = "train"


class Taskset:
    """Base class of tasksets: `load` yields the tasks, hooks define everything else.

    - `config`: the options, as an object of the class that annotates this attribute.
    - `task_type`: the class of the tasks, used to decode tasks that come from another process.
    - `requires_vision`: whether the model must take images. A run with another model is then refused at its start.

    A subclass may define these hooks. A hook takes the parameters that it names, out of the fields of `RolloutContext`
    (`task`, `trace`, `state`, `rng`, `runtime`, `endpoint`), and may be async.

    - `setup`: prepares a rollout before its first turn; `finalize`: ends it after the last turn.
    - `tools`: returns the functions that the model may call, in addition to the methods with `@tool`.
    - `user`: returns the `User` that answers the model's replies, or None.
    - `run_agent`: runs the agent itself, with model calls to `endpoint`, and returns the stop reason. A taskset with
      this hook takes the place of the harness `chat`.
    - `gold`: returns the replies of a perfect agent: a text, a message, or a list of them.
    - `validate`: checks a task; it raises, or returns False or a text, if something is wrong. `ramify validate` calls
      `validate` and `gold`; both may name `task`, `runtime`, `rng` and `state`.
    - a method with `@reward`: returns a number; the reward of a rollout is the weighted sum.
    - a method with `@turn_reward`: returns a number or None for each turn of a rollout.
    - a method with `@group_reward`: takes `traces`, all attempts at a task, and returns one number for each. It may
      also name `task` and `rng`.
    - a method with `@metric`: returns a number that is only reported.
    - a method with `@stop`: returns whether the rollout is over; it is called after every turn.
    - a method with `@tool`: a function that the model may call.
    """

    config: TasksetConfig
    task_type: ClassVar[type[Task]] = Task
    requires_vision: ClassVar[bool] = False

    def __init__(self, config: TasksetConfig | None = None) -> None:
        self.config = get_config_class(type(self), TasksetConfig)() if config is None else config

    def load(self) -> Iterable[Task]:
        """Return the tasks, in an order that depends only on the config. The iterable may be infinite."""
        raise NotImplementedError(f"{type(self).__name__} has no load()")
