"""A taskset yields tasks and defines how attempts at them are set up, stopped and scored.

A user writes a subclass. `load` is the only required method. All others are optional hooks, recognized by their name
(`setup`, `finalize`, `tools`, `user`, `run_agent`, `validate`, `gold`) or by their decorator (`@reward`,
`@group_reward`, `@metric`, `@stop`, `@tool`). A hook takes what it names, see `ramify.env.hook`. Hooks are collected
and checked once, so errors such as an unknown parameter are raised before the first rollout.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ramify.core.config import Config
from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.env.context import CONTEXT_FIELDS, RolloutContext
from ramify.env.decorators import HookKind, HookMark, get_mark
from ramify.env.hook import Hook
from ramify.env.plugin import get_config_class
from ramify.env.task import Task
from ramify.env.tools import ToolSet
from ramify.env.user import User

# The parameters of hooks that run outside of a rollout.
_GROUP_REWARD_FIELDS = ("task", "traces", "rng")
_VALIDATION_FIELDS = ("task", "runtime", "rng", "state")
_FIELDS_BY_HOOK_NAME = {
    "setup": CONTEXT_FIELDS,
    "finalize": CONTEXT_FIELDS,
    "tools": CONTEXT_FIELDS,
    "user": CONTEXT_FIELDS,
    "run_agent": CONTEXT_FIELDS,
    "validate": _VALIDATION_FIELDS,
    "gold": _VALIDATION_FIELDS,
}


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


@dataclass(frozen=True, slots=True)
class TasksetHooks:
    """The hooks of one taskset: decorated methods by kind, and hooks by method name, None if it has no such method."""

    rewards: tuple[Hook, ...] = ()  # including rewards of single turns
    turn_reward_names: frozenset[str] = frozenset()
    group_rewards: tuple[Hook, ...] = ()
    metrics: tuple[Hook, ...] = ()
    stops: tuple[Hook, ...] = ()
    setup: Hook | None = None
    finalize: Hook | None = None
    tools: Hook | None = None
    user: Hook | None = None
    run_agent: Hook | None = None
    validate: Hook | None = None
    gold: Hook | None = None
    static_tools: ToolSet = field(default_factory=ToolSet)  # the @tool methods, the same for every task

    async def build_toolset(self, context: RolloutContext) -> ToolSet:
        """Return the tools of a rollout: the `@tool` methods, then the result of the `tools` hook."""
        if self.tools is None:
            return self.static_tools
        return ToolSet([*self.static_tools.tools, *(await self.tools(context) or ())])

    async def build_user(self, context: RolloutContext) -> User | None:
        """Return the simulated user of a rollout, or None."""
        user = None if self.user is None else await self.user(context)
        if user is not None and not isinstance(user, User):
            raise EnvironmentFault(f"user: expected a User or None, found a {type(user).__qualname__}")
        return user


def collect_hooks(taskset: Taskset) -> TasksetHooks:
    """Return the hooks of a taskset. Raises ConfigInvalid for a hook that could not be called."""
    owner = type(taskset).__name__
    hooks_by_kind: dict[HookKind, list[Hook]] = {kind: [] for kind in HookKind}
    static_tools: list[Callable[..., Any]] = []
    for name, mark in _collect_marks(type(taskset)).items():
        method = _get_method(taskset, name)
        if mark.kind is HookKind.TOOL:
            static_tools.append(method)
            continue
        available = _GROUP_REWARD_FIELDS if mark.kind is HookKind.GROUP_REWARD else CONTEXT_FIELDS
        hooks_by_kind[mark.kind].append(Hook(method, owner, available=available, weight=mark.weight))
    named = {
        name: Hook(_get_method(taskset, name), owner, available=available)
        for name, available in _FIELDS_BY_HOOK_NAME.items()
        if hasattr(taskset, name)
    }
    for hook in hooks_by_kind[HookKind.GROUP_REWARD]:
        if "traces" not in hook.injected_parameters:
            raise ConfigInvalid(f"{owner}.{hook.name}: a group reward scores all attempts, so it must name `traces`")
    return TasksetHooks(
        rewards=(*hooks_by_kind[HookKind.REWARD], *hooks_by_kind[HookKind.TURN_REWARD]),
        turn_reward_names=frozenset(hook.name for hook in hooks_by_kind[HookKind.TURN_REWARD]),
        group_rewards=tuple(hooks_by_kind[HookKind.GROUP_REWARD]),
        metrics=tuple(hooks_by_kind[HookKind.METRIC]),
        stops=tuple(hooks_by_kind[HookKind.STOP]),
        static_tools=ToolSet(static_tools),
        **named,
    )


def _collect_marks(cls: type) -> dict[str, HookMark]:
    """Return the marks of decorated methods in source order. An override without a decorator inherits the mark."""
    marks: dict[str, HookMark] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if (mark := get_mark(value)) is not None:
                marks[name] = mark
    return marks


def _get_method(taskset: Taskset, name: str) -> Callable[..., Any]:
    method = getattr(taskset, name)
    if not callable(method):
        raise ConfigInvalid(f"{type(taskset).__name__}.{name}: expected a method, found a {type(method).__qualname__}")
    return method
