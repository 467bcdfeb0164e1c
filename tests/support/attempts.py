"""Environments defined in tests and loaded like a user's, and attempts with a scripted model."""

import asyncio
import json
from typing import Any

import ramify as rf
from ramify.infer.gateway import TokenPolicy
from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.trace import Trace
from tests.support.engine import TINY, ScriptedClient

TASK = rf.Task(prompt="go", answer="42", system="Be brief.")


class OneTask(rf.Taskset):
    """A taskset with one task; tests add hooks."""

    def load(self):
        yield TASK


def load_env(taskset: type[rf.Taskset], **source: Any) -> Environment:
    """Load the environment of a class in the same way as a plugin."""
    import sys

    module = sys.modules[taskset.__module__]
    name = f"{taskset.__name__}_{id(taskset)}"
    setattr(module, name, taskset)  # a class defined inside a test is not an attribute of its module
    return Environment.load(SourceConfig(**{"taskset": {"id": f"{module.__name__}:{name}"}, **source}))


def scripted_policy(script) -> TokenPolicy:
    return TokenPolicy(ScriptedClient(script), TINY, "tiny")


def tool_call(name: str, **arguments: Any) -> str:
    """Return a tool call as the tiny model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def run_one_async(env: Environment, script, task: rf.Task = TASK, **options: Any) -> Trace:
    """Run one attempt and return its trace."""
    episode = await run_attempt(env, task, policy=scripted_policy(script), id="r1", **options)
    (trace,) = episode.traces
    return trace


async def run_one(env: Environment, script, task: rf.Task = TASK, **options: Any) -> Trace:
    """Run one attempt, close its environment, and return the trace."""
    async with asyncio.timeout(60):
        try:
            return await run_one_async(env, script, task, **options)
        finally:
            await env.close()  # stops the runtime that was prepared for another attempt


def list_messages(trace: Trace) -> list[tuple[str, str]]:
    """Return role and text of every message in order."""
    return [(node.message.role, node.message.text) for node in trace.nodes]


def error_names(trace: Trace) -> list[str]:
    return [error.name for error in trace.errors]
