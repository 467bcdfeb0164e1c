"""Scoring: run the rewards and metrics of a rollout. A reward that fails stays None and does not affect the others.

A missing reward is never 0: a policy must not be trained on failures of its environment.
"""

import asyncio
import contextlib
import random
from collections.abc import Generator, Sequence
from typing import Any

from ramify.core.async_calls import fail_after
from ramify.core.config.schema import is_list
from ramify.core.errors import EnvironmentFault, Failure, OperationInvalid, RamifyError
from ramify.core.errors.origin import describe_exception
from ramify.env import Hook, RolloutContext, Task
from ramify.env.hook import is_current_task_cancelled
from ramify.rollout.environment import Environment
from ramify.trace import Trace
from ramify.trace.header import TURN_REWARDS_KEY

# Errors of an environment's code become failures with a name.


@contextlib.contextmanager
def raise_environment_faults(what: str) -> Generator[None]:
    """Raise errors of the block as EnvironmentFault; `what` names the code that runs in it.

    A RamifyError, and the cancellation of the current task itself, pass unchanged. KeyboardInterrupt is an error of the
    code too: at Ctrl-C, asyncio cancels the main task instead of raising it.
    """
    try:
        yield
    except RamifyError:
        raise
    except asyncio.CancelledError as error:
        if is_current_task_cancelled():
            raise
        raise EnvironmentFault(f"{what}: CancelledError: something it awaited was cancelled") from error
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        raise EnvironmentFault(f"{what}: {describe_exception(error)}") from error


def build_unscored_rewards(env: Environment) -> dict[str, Any]:
    """Return the names of all rewards, each with the value None."""
    return {hook.name: None for hook in (*env.hooks.rewards, *env.hooks.group_rewards)}


async def score_trace(env: Environment, context: RolloutContext, *, with_metrics: bool = True) -> None:
    """Run the rewards and metrics of one rollout. Failures are added to the trace and not raised."""
    trace = context.trace
    with _record_failures([trace]):
        async with fail_after(context.task.scoring_timeout or env.source.timeouts.scoring, "scoring"):
            for hook in env.hooks.rewards:
                with _record_failures([trace]), raise_environment_faults(hook.name):
                    value = await hook(context)
                    if hook.name in env.hooks.turn_reward_names:
                        value = _record_turn_rewards(hook, value, trace)
                    trace.rewards[hook.name] = (value, hook.weight)
            for hook in env.hooks.metrics if with_metrics else ():
                with _record_failures([trace]), raise_environment_faults(hook.name):
                    trace.metrics[hook.name] = await hook(context)


def _record_turn_rewards(hook: Hook, values: Any, trace: Trace) -> float:
    """Store the rewards of the turns in the trace's info, and return their sum."""
    expected = f"{hook.name}: expected a number or None for each of {trace.num_turns} turns"
    if not is_list(values):
        raise EnvironmentFault(f"{expected}, got a {type(values).__qualname__}")
    if len(values) != trace.num_turns:
        raise EnvironmentFault(f"{expected}, got {len(values)} values")
    scores = [None if value is None else float(value) for value in values]
    trace.info[TURN_REWARDS_KEY] = {**trace.info.get(TURN_REWARDS_KEY, {}), hook.name: scores}
    return sum(score for score in scores if score is not None)


async def score_group(env: Environment, task: Task, traces: Sequence[Trace]) -> None:
    """Run the group rewards of all attempts at a task. A failure is added to every trace and not raised."""
    if not traces:
        return
    context = RolloutContext(task, traces[0], rng=random.Random(f"{traces[0].group}:{task.identity}"))
    for hook in env.hooks.group_rewards:
        with _record_failures(traces):
            async with fail_after(env.source.timeouts.scoring, f"the group reward {hook.name}"):
                with raise_environment_faults(hook.name):
                    values = await hook(context, traces=list(traces))
                _set_group_rewards(hook, values, traces)


def _set_group_rewards(hook: Hook, values: Any, traces: Sequence[Trace]) -> None:
    try:
        scores = list(values)
    except TypeError:
        raise EnvironmentFault(
            f"{hook.name}: expected one number for each trace, found a {type(values).__qualname__}"
        ) from None
    if len(scores) != len(traces):
        raise EnvironmentFault(f"{hook.name}: {len(scores)} scores for {len(traces)} traces")
    previous_rewards = [trace.rewards.get(hook.name) for trace in traces]
    try:
        for trace, value in zip(traces, scores):
            trace.rewards[hook.name] = (value, hook.weight)
    except OperationInvalid:
        for trace, reward in zip(traces, previous_rewards):
            trace.rewards[hook.name] = reward
        raise


@contextlib.contextmanager
def _record_failures(traces: Sequence[Trace]) -> Generator[None]:
    """Add an error of the block to the traces instead of raising it."""
    try:
        yield
    except RamifyError as error:
        for trace in traces:
            trace.errors.append(Failure.from_exception(error))
