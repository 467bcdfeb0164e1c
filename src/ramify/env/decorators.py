"""The decorators of hooks. A decorator only attaches a mark, so the function can still be called and tested."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])

_MARK_ATTRIBUTE = "__ramify_mark__"

MISSING_REWARD_ADVICE = "mark a method of the taskset with @rf.reward"  # in errors about missing rewards


class HookKind(StrEnum):
    """The kind of a decorated hook."""

    REWARD = "reward"
    GROUP_REWARD = "group_reward"
    TURN_REWARD = "turn_reward"
    METRIC = "metric"
    STOP = "stop"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class HookMark:
    """What a decorator records on its function: the kind and, for rewards, the weight."""

    kind: HookKind
    weight: float = 1.0


def get_mark(function: Any) -> HookMark | None:
    """Return the mark of a decorated function, or None."""
    return getattr(function, _MARK_ATTRIBUTE, None)


@overload
def reward(function: F, /) -> F: ...
@overload
def reward(*, weight: float = 1.0) -> Callable[[F], F]: ...
def reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """Mark a method that returns a score of one rollout.

    A rollout's reward is the sum of its scores, each multiplied by its `weight`.
    """
    return _attach_mark(function, HookMark(HookKind.REWARD, weight))


@overload
def group_reward(function: F, /) -> F: ...
@overload
def group_reward(*, weight: float = 1.0) -> Callable[[F], F]: ...
def group_reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """Mark a method that scores all attempts at a task together: it takes `traces` and returns one number for each.

    Each number is a score of its rollout, which is multiplied by `weight`.
    """
    return _attach_mark(function, HookMark(HookKind.GROUP_REWARD, weight))


@overload
def turn_reward(function: F, /) -> F: ...
@overload
def turn_reward(*, weight: float = 1.0) -> Callable[[F], F]: ...
def turn_reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """Mark a method that scores the turns of a rollout: it returns one number or None for each, in order.

    The sum of the numbers is a score of the rollout, which is multiplied by `weight`. The algorithm `turn_credit` also
    uses the single numbers.
    """
    return _attach_mark(function, HookMark(HookKind.TURN_REWARD, weight))


def metric(function: F, /) -> F:
    """Mark a method that returns a number which is reported but not part of the reward."""
    return _attach_mark(function, HookMark(HookKind.METRIC))


def stop(function: F, /) -> F:
    """Mark a method that returns whether the rollout is over. It is called after every turn; its name is recorded as
    the stop reason."""
    return _attach_mark(function, HookMark(HookKind.STOP))


def tool(function: F, /) -> F:
    """Mark a method as a tool of the model. Its annotations define the schema, its docstring the description."""
    return _attach_mark(function, HookMark(HookKind.TOOL))


def _attach_mark(function: Any, mark: HookMark) -> Any:
    if function is None:
        return partial(_attach_mark, mark=mark)
    setattr(function, _MARK_ATTRIBUTE, mark)
    return function
