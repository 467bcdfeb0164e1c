"""Environments written in a test, loaded as a user's are, and attempts at their tasks with a scripted model."""

import asyncio
import json
from typing import Any

import ramify as rf
from ramify.gateway import TokenPolicy
from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.trace import Trace
from tests.gateway.engine import TINY
from tests.gateway.sampler import Sampler

TASK = rf.Task(prompt="go", answer="42", system="Be brief.")


class OneTask(rf.Taskset):
    """One task; a test adds what it is about."""

    def load(self):
        yield TASK


def environment(taskset: type[rf.Taskset], **source: Any) -> Environment:
    """The environment of a class, through the same door as any plugin."""
    import sys

    module = sys.modules[taskset.__module__]
    name = f"{taskset.__name__}_{id(taskset)}"
    setattr(module, name, taskset)  # a class made inside a test is no attribute of its module
    return Environment.load(SourceConfig(**{"taskset": {"id": f"{module.__name__}:{name}"}, **source}))


def policy_of(script) -> TokenPolicy:
    return TokenPolicy(Sampler(script), TINY, "tiny")


def call(name: str, **arguments: Any) -> str:
    """A tool call as the tiny model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def attempted(env: Environment, script, task: rf.Task = TASK, **options: Any) -> Trace:
    """The trace of one attempt."""
    episode = await run_attempt(env, task, policy=policy_of(script), id="r1", **options)
    (trace,) = episode.traces
    return trace


def attempt(env: Environment, script, task: rf.Task = TASK, **options: Any) -> Trace:
    """The same, in a loop of its own."""
    return asyncio.run(asyncio.wait_for(attempted(env, script, task, **options), 20))


def said(trace: Trace) -> list[tuple[str, str]]:
    """Role and text of every message, in the order they came."""
    return [(node.message.role, node.message.text) for node in trace.nodes]


def names(trace: Trace) -> list[str]:
    return [error.name for error in trace.errors]
