"""Call a hook with exactly the arguments its signature names.

A hook `def solved(self, task, trace)` gets the task and the trace, in whatever order it names them. A misspelled
parameter must not surface in the middle of a run, so the signature is inspected once, when the `Hook` is created, and
an unknown parameter is refused there. A call then only looks up a few fields. A hook that is not async runs in a
thread, so that a blocking hook does not delay other rollouts.
"""

import asyncio
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ramify.core.errors import ConfigInvalid
from ramify.core.names import find_similar
from ramify.env.context import CONTEXT_FIELDS, RolloutContext
from ramify.env.hook_threads import run_in_hook_thread

_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Hook:
    """A function of the environment that is called with fields of a `RolloutContext`.

    `injected_parameters` are the fields that its signature names, `weight` is its weight if it is a reward.
    """

    __slots__ = ("function", "injected_parameters", "is_async", "name", "weight")

    def __init__(
        self,
        function: Callable[..., Any],
        owner: str,
        *,
        available: tuple[str, ...] = CONTEXT_FIELDS,
        weight: float = 1.0,
    ) -> None:
        self.function = function
        self.name: str = function.__name__
        self.weight = weight
        unbound = getattr(function, "__func__", function)  # a bound method is a new object on each access
        self.injected_parameters, self.is_async = _inspect_signature(unbound, unbound is not function, available, owner)

    async def __call__(self, context: RolloutContext, **extra: Any) -> Any:
        """Call the function with the parameters it names, taken from `extra` or else from the context."""
        kwargs = {name: extra[name] if name in extra else getattr(context, name) for name in self.injected_parameters}
        if self.is_async:
            return await self.function(**kwargs)
        return await run_in_hook_thread(self.function, kwargs)

    def __repr__(self) -> str:
        return f"Hook({self.name}: {', '.join(sorted(self.injected_parameters))})"


def is_current_task_cancelled() -> bool:
    """Return whether the current task itself is being cancelled.

    If it is not, a CancelledError comes from something that the task awaited.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Return whether calling the function returns a coroutine."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def list_parameters(function: Callable[..., Any], *, bound: bool) -> list[inspect.Parameter]:
    """Return the parameters that a caller passes. `bound`: leave out the first one, the `self` of a method."""
    return list(inspect.signature(function).parameters.values())[bound:]


@lru_cache(maxsize=4096)
def _inspect_signature(
    function: Callable[..., Any], bound: bool, available: tuple[str, ...], owner: str
) -> tuple[frozenset[str], bool]:
    """Return the available parameters that a function names, and whether it is async.

    Raises ConfigInvalid for a required parameter that is not available.
    """
    injected_parameters: set[str] = set()
    for parameter in list_parameters(function, bound=bound):
        if parameter.name in available and parameter.kind in _KEYWORD_KINDS:
            injected_parameters.add(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in _VARIADIC_KINDS:
            similar = find_similar(parameter.name, available)
            hint = f"did you mean {similar}? " if similar else ""
            raise ConfigInvalid(
                f"{owner}.{function.__name__}: unknown parameter {parameter.name!r}; "
                f"{hint}available parameters: {', '.join(available)}"
            )
    return frozenset(injected_parameters), is_coroutine_function(function)
