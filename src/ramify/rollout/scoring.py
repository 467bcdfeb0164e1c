"""Scores: every reward that is due runs or stays None, and one that fails takes no other with it.

A missing score is never 0: a policy must not be trained on what its environment failed to say.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from ramify.env import Hook, RolloutContext, Task
from ramify.env.hook import is_current_task_cancelled
from ramify.errors import EnvironmentFault, Failure, RamifyError, ValueRefused
from ramify.errors.origin import describe_exception
from ramify.rollout.environment import Environment
from ramify.rollout.timeout import fail_after
from ramify.trace import Trace


def build_unscored_rewards(env: Environment) -> dict[str, Any]:
    """The rewards a rollout has to have, none of which has run."""
    return {hook.name: None for hook in (*env.hooks.rewards, *env.hooks.group_rewards)}


async def score_trace(env: Environment, context: RolloutContext, *, with_metrics: bool = True) -> None:
    """Run all rewards of one rollout, and its metrics. Failures are added to the trace, nothing is raised."""
    trace = context.trace
    try:
        async with fail_after(env.source.timeouts.scoring, "scoring"):
            for hook in env.hooks.rewards:
                await _run_scorer(hook, context, trace.rewards, lambda value, hook=hook: (value, hook.weight))
            for hook in env.hooks.metrics if with_metrics else ():
                await _run_scorer(hook, context, trace.metrics, lambda value: value)
    except RamifyError as error:
        trace.errors.append(Failure.from_exception(error))


async def score_group(env: Environment, task: Task, traces: Sequence[Trace]) -> None:
    """Run the group rewards of all attempts at a task. A failure is added to every trace, nothing is raised."""
    if not traces:
        return
    context = RolloutContext(task, traces[0], rng=random.Random(f"{traces[0].group}:{task.identity}"))
    for hook in env.hooks.group_rewards:
        try:
            async with fail_after(env.source.timeouts.scoring, f"the group reward {hook.name}"):
                _set_group_rewards(hook, await _call_hook(hook, context, traces=list(traces)), traces)
        except RamifyError as error:
            for trace in traces:
                trace.errors.append(Failure.from_exception(error))


def _set_group_rewards(hook: Hook, values: Any, traces: Sequence[Trace]) -> None:
    try:
        scores = list(values)
    except TypeError:
        raise EnvironmentFault(
            f"{hook.name}: expected one number for each trace, found a {type(values).__qualname__}"
        ) from None
    if len(scores) != len(traces):
        raise EnvironmentFault(f"{hook.name}: {len(scores)} scores for {len(traces)} traces")
    before = [trace.rewards.get(hook.name) for trace in traces]
    try:
        for trace, value in zip(traces, scores):
            trace.rewards[hook.name] = (value, hook.weight)
    except ValueRefused:
        for trace, entry in zip(traces, before):
            trace.rewards[hook.name] = entry
        raise


async def _run_scorer(
    hook: Hook, context: RolloutContext, scores: dict[str, Any], make_score: Callable[[Any], Any]
) -> None:
    try:
        scores[hook.name] = make_score(await _call_hook(hook, context))
    except RamifyError as error:
        context.trace.errors.append(Failure.from_exception(error))


async def _call_hook(hook: Hook, context: RolloutContext, **extra: Any) -> Any:
    """The hook's result; whatever it raises without a name of ours is the environment's fault."""
    try:
        return await hook(context, **extra)
    except RamifyError:
        raise
    except asyncio.CancelledError as error:
        if is_current_task_cancelled():
            raise
        raise EnvironmentFault(f"{hook.name}: CancelledError: what it waited for was cancelled") from error
    except (Exception, SystemExit) as error:
        raise EnvironmentFault(f"{hook.name}: {describe_exception(error)}") from error
