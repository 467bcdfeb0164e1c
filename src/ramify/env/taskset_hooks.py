"""The hooks of a taskset, collected and checked once, when it is loaded.

Errors in a hook are raised here, before the first rollout: an unknown parameter, a tool without type annotations.
Whatever is the same for all rollouts is also computed here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.env.context import CONTEXT_FIELDS, RolloutContext
from ramify.env.decorators import HookKind, HookMark, get_mark
from ramify.env.hook import Hook
from ramify.env.taskset import Taskset
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
