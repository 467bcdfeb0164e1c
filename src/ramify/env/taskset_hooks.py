"""All hooks of a taskset, found and checked once, when it is loaded.

What is wrong with a hook shows here, before the first rollout: a parameter nobody provides, a tool without types. What
is the same for every rollout is worked out here too, so that a rollout only calls.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ramify.env.context import CONTEXT_FIELDS, Endpoint, RolloutContext
from ramify.env.decorators import HookKind, HookMark, get_mark
from ramify.env.hook import Hook
from ramify.env.taskset import Taskset
from ramify.env.tools import Tool, ToolSet
from ramify.env.user import User
from ramify.errors import ConfigInvalid, EnvironmentFault

__all__ = ["Endpoint", "Hook", "RolloutContext", "TasksetHooks", "collect_hooks"]

# What may be named by hooks that run without a rollout around them.
_GROUP_REWARD_FIELDS = ("task", "traces", "rng")
_VALIDATION_FIELDS = ("task", "runtime", "rng", "state")
_FIELDS_BY_HOOK_NAME = {
    "setup": CONTEXT_FIELDS,
    "finalize": CONTEXT_FIELDS,
    "tools": CONTEXT_FIELDS,
    "user": CONTEXT_FIELDS,
    "validate": _VALIDATION_FIELDS,
    "gold": _VALIDATION_FIELDS,
}


@dataclass(frozen=True, slots=True)
class TasksetHooks:
    """The hooks of one taskset. Those found by name are None where it has none."""

    rewards: tuple[Hook, ...] = ()
    group_rewards: tuple[Hook, ...] = ()
    metrics: tuple[Hook, ...] = ()
    stops: tuple[Hook, ...] = ()
    setup: Hook | None = None
    finalize: Hook | None = None
    tools: Hook | None = None
    user: Hook | None = None
    validate: Hook | None = None
    gold: Hook | None = None
    static_tools: ToolSet = field(default_factory=ToolSet)  # the @tool methods, the same for every task

    async def build_toolset(self, context: RolloutContext) -> ToolSet:
        """The tools of this rollout: the `@tool` methods, then what `tools` returns for its task."""
        if self.tools is None:
            return self.static_tools
        return ToolSet.wrap([*self.static_tools.tools, *(await self.tools(context) or ())])

    async def build_user(self, context: RolloutContext) -> User | None:
        """Who plays the user in this rollout, if anybody does."""
        user = None if self.user is None else await self.user(context)
        if user is not None and not isinstance(user, User):
            raise EnvironmentFault(f"user: expected a User or None, found a {type(user).__qualname__}")
        return user


def collect_hooks(taskset: Taskset) -> TasksetHooks:
    """The hooks of a taskset; raises ConfigInvalid for one that could not be called."""
    owner = type(taskset).__name__
    hooks_by_kind: dict[HookKind, list[Hook]] = {kind: [] for kind in HookKind}
    static_tools: list[Tool] = []
    for name, mark in _collect_marks(type(taskset)).items():
        method = _get_method(taskset, name)
        if mark.kind is HookKind.TOOL:
            static_tools.append(Tool.wrap(method))
            continue
        available = _GROUP_REWARD_FIELDS if mark.kind is HookKind.GROUP_REWARD else CONTEXT_FIELDS
        hooks_by_kind[mark.kind].append(Hook(method, owner, available=available, weight=mark.weight))
    named = {
        name: Hook(_get_method(taskset, name), owner, available=offered)
        for name, offered in _FIELDS_BY_HOOK_NAME.items()
        if hasattr(taskset, name)
    }
    for hook in hooks_by_kind[HookKind.GROUP_REWARD]:
        if "traces" not in hook.injected_parameters:
            raise ConfigInvalid(f"{owner}.{hook.name}: a group reward judges all attempts, so it must name `traces`")
    return TasksetHooks(
        rewards=tuple(hooks_by_kind[HookKind.REWARD]),
        group_rewards=tuple(hooks_by_kind[HookKind.GROUP_REWARD]),
        metrics=tuple(hooks_by_kind[HookKind.METRIC]),
        stops=tuple(hooks_by_kind[HookKind.STOP]),
        static_tools=ToolSet.wrap(static_tools),
        **named,
    )


def _collect_marks(cls: type) -> dict[str, HookMark]:
    """The marked methods in the order they were written. One that is overridden without a mark keeps the old one."""
    marks: dict[str, HookMark] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if (mark := get_mark(value)) is not None:
                marks[name] = mark
    return marks


def _get_method(taskset: Taskset, name: str) -> Callable[..., Any]:
    method = getattr(taskset, name)
    if not callable(method):
        raise ConfigInvalid(f"{type(taskset).__name__}.{name}: a hook is a method, found a {type(method).__qualname__}")
    return method
