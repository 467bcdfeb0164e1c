"""A rollout context for tests, and a way to run a test's coroutine."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from ramify.env import RolloutContext, Task
from ramify.trace import Message, Trace


def make_context(task: Task | None = None, *replies: str, **more: Any) -> RolloutContext:
    trace = Trace(id="trace-1")
    parent = trace.graph.add_node(-1, Message("user", "question"))
    for reply in replies:
        parent = trace.graph.add_node(parent, Message("assistant", reply))
    return RolloutContext(task=task or Task(prompt="question"), trace=trace, **more)


def run(test: Coroutine[Any, Any, Any], *, seconds: float = 60) -> Any:
    return asyncio.run(asyncio.wait_for(test, seconds))
