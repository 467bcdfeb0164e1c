"""Calling code of the environment with what it names.

A hook `def solved(self, task, trace)` gets the task and the trace: nobody has to agree on an order, or to pass on what
is not wanted. The price would be a wrong name that surfaces in the middle of a run, so a signature is read once, when
the hook is made, and a parameter that nobody provides is refused there. A call then only looks up a few fields. Code
that is not async runs in a thread: whatever it waits for, the other rollouts go on.
"""

import asyncio
import difflib
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ramify.env.context import OFFERED, Context
from ramify.env.crew import in_thread
from ramify.errors import ConfigInvalid

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Hook:
    """A function of the environment, ready to be called with a context."""

    __slots__ = ("asks", "function", "is_async", "name", "weight")

    def __init__(
        self, function: Callable[..., Any], owner: str, *, offered: tuple[str, ...] = OFFERED, weight: float = 1.0
    ) -> None:
        self.function = function
        self.name: str = function.__name__
        self.weight = weight
        plain = getattr(function, "__func__", function)  # a bound method is another object each time
        self.asks, self.is_async = _read(plain, plain is not function, offered, owner)

    async def __call__(self, context: Context, **more: Any) -> Any:
        """Call it with what it names of the context and of `more`."""
        given = {name: more[name] if name in more else getattr(context, name) for name in self.asks}
        if self.is_async:
            return await self.function(**given)
        return await in_thread(self.function, given)

    def __repr__(self) -> str:
        return f"Hook({self.name}: {', '.join(sorted(self.asks))})"


def given_up() -> bool:
    """Whether the running task itself was cancelled; if not, a CancelledError in it is that of something it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function gives a coroutine."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def parameters(function: Callable[..., Any], *, bound: bool) -> list[inspect.Parameter]:
    """The parameters a caller fills; `bound` says that the first is the `self` of a method."""
    return list(inspect.signature(function).parameters.values())[bound:]


@lru_cache(maxsize=4096)
def _read(
    function: Callable[..., Any], bound: bool, offered: tuple[str, ...], owner: str
) -> tuple[frozenset[str], bool]:
    """The names a function asks for, and whether it is async; a required one that is not offered is refused."""
    asks: set[str] = set()
    for parameter in parameters(function, bound=bound):
        if parameter.name in offered and parameter.kind in _NAMED:
            asks.add(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in _OPEN:
            alike = difflib.get_close_matches(parameter.name, offered, n=1)
            meant = f"did you mean {alike[0]}? " if alike else ""
            raise ConfigInvalid(
                f"{owner}.{function.__name__}: nobody provides its parameter {parameter.name!r}; "
                f"{meant}it may name {', '.join(offered)}"
            )
    return frozenset(asks), is_async(function)
