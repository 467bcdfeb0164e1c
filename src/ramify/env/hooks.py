"""All hooks of a taskset, found and checked once, when it is loaded.

What is wrong with a hook shows here, before the first rollout: a parameter nobody provides, a tool without types. What
is the same for every rollout is worked out here too, so that a rollout only calls.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ramify.env.calling import Hook
from ramify.env.context import OFFERED, Context, Endpoint
from ramify.env.marks import Kind, Mark, mark_of
from ramify.env.taskset import Taskset
from ramify.env.tools import Tool, ToolSet
from ramify.env.user import User
from ramify.errors import ConfigInvalid, EnvironmentFault

__all__ = ["Context", "Endpoint", "Hook", "Hooks", "hooks_of"]

# What may be named by hooks that run without a rollout around them.
_GROUP = ("task", "traces", "rng")
_DRY = ("task", "runtime", "rng", "state")
_BY_NAME = {"setup": OFFERED, "finalize": OFFERED, "tools": OFFERED, "user": OFFERED, "validate": _DRY, "gold": _DRY}


@dataclass(frozen=True, slots=True)
class Hooks:
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
    standing: ToolSet = field(default_factory=ToolSet)  # the @tool methods, the same for every task

    async def toolset(self, context: Context) -> ToolSet:
        """The tools of this rollout: the `@tool` methods, then what `tools` returns for its task."""
        if self.tools is None:
            return self.standing
        return ToolSet.of([*self.standing.tools, *(await self.tools(context) or ())])

    async def make_user(self, context: Context) -> User | None:
        """Who plays the user in this rollout, if anybody does."""
        user = None if self.user is None else await self.user(context)
        if user is not None and not isinstance(user, User):
            raise EnvironmentFault(f"user: expected a User or None, found a {type(user).__qualname__}")
        return user


def hooks_of(taskset: Taskset) -> Hooks:
    """The hooks of a taskset; raises ConfigInvalid for one that could not be called."""
    owner = type(taskset).__name__
    marked: dict[Kind, list[Hook]] = {kind: [] for kind in Kind}
    standing: list[Tool] = []
    for name, mark in _marks(type(taskset)).items():
        method = _method(taskset, name)
        if mark.kind is Kind.TOOL:
            standing.append(Tool.of(method))
            continue
        offered = _GROUP if mark.kind is Kind.GROUP_REWARD else OFFERED
        marked[mark.kind].append(Hook(method, owner, offered=offered, weight=mark.weight))
    named = {
        name: Hook(_method(taskset, name), owner, offered=offered)
        for name, offered in _BY_NAME.items()
        if hasattr(taskset, name)
    }
    for hook in marked[Kind.GROUP_REWARD]:
        if "traces" not in hook.asks:
            raise ConfigInvalid(f"{owner}.{hook.name}: a group reward judges all attempts, so it must name `traces`")
    return Hooks(
        rewards=tuple(marked[Kind.REWARD]),
        group_rewards=tuple(marked[Kind.GROUP_REWARD]),
        metrics=tuple(marked[Kind.METRIC]),
        stops=tuple(marked[Kind.STOP]),
        standing=ToolSet.of(standing),
        **named,
    )


def _marks(cls: type) -> dict[str, Mark]:
    """The marked methods in the order they were written. One that is overridden without a mark keeps the old one."""
    found: dict[str, Mark] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if (mark := mark_of(value)) is not None:
                found[name] = mark
    return found


def _method(taskset: Taskset, name: str) -> Callable[..., Any]:
    method = getattr(taskset, name)
    if not callable(method):
        raise ConfigInvalid(f"{type(taskset).__name__}.{name}: a hook is a method, found a {type(method).__qualname__}")
    return method
