"""The decorators: they leave a mark on a function and hand it back as it was, so it can still be called and tested."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])

_MARK_ATTRIBUTE = "__ramify_mark__"

MISSING_REWARD_ADVICE = "mark a method of the taskset with @rf.reward"  # the advice where a taskset has none


class HookKind(StrEnum):
    """What a marked function is."""

    REWARD = "reward"
    GROUP_REWARD = "group_reward"
    METRIC = "metric"
    STOP = "stop"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class HookMark:
    """What a decorator says about its function."""

    kind: HookKind
    weight: float = 1.0


def get_mark(function: Any) -> HookMark | None:
    """The mark of a function, if a decorator left one."""
    return getattr(function, _MARK_ATTRIBUTE, None)


@overload
def reward(function: F, /) -> F: ...
@overload
def reward(*, weight: float = 1.0) -> Callable[[F], F]: ...
def reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """A score of one rollout; the rollout's reward is the weighted sum of them."""
    return _attach_mark(function, HookMark(HookKind.REWARD, weight))


@overload
def group_reward(function: F, /) -> F: ...
@overload
def group_reward(*, weight: float = 1.0) -> Callable[[F], F]: ...
def group_reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """A score that needs to see all attempts at a task: it names `traces` and returns one number for each."""
    return _attach_mark(function, HookMark(HookKind.GROUP_REWARD, weight))


def metric(function: F, /) -> F:
    """A number that is reported but not rewarded."""
    return _attach_mark(function, HookMark(HookKind.METRIC))


def stop(function: F, /) -> F:
    """Whether the rollout is over, asked after every turn; its name is the reason that is recorded."""
    return _attach_mark(function, HookMark(HookKind.STOP))


def tool(function: F, /) -> F:
    """A function the model may call: its annotations are the schema, its docstring the description."""
    return _attach_mark(function, HookMark(HookKind.TOOL))


def _attach_mark(function: Any, mark: HookMark) -> Any:
    if function is None:
        return lambda given: _attach_mark(given, mark)
    setattr(function, _MARK_ATTRIBUTE, mark)
    return function
