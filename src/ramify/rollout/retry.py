"""Run a rollout, and start it again after a system failure."""

from typing import TYPE_CHECKING

from ramify.core.errors import Failure
from ramify.env import Task
from ramify.infer.gateway.policy import Policy
from ramify.rollout.attempt import ProgressCallback, run_attempt
from ramify.rollout.environment import Environment
from ramify.trace import Episode, Trace

if TYPE_CHECKING:
    from ramify.infer.gateway import Gateway

REWARD_MISSING = Failure("EnvironmentFault", "a reward did not run", "system", True)


async def run_rollout(
    env: Environment,
    task: Task,
    *,
    policy: Policy,
    gateway: "Gateway | None" = None,
    id: str,
    group: str = "",
    attempt: int = 0,
    seed: int = 0,
    train: bool = False,
    max_tries: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> Episode:
    """Run one attempt, up to `max_tries` times (default: `source.max_tries`) while it ends with a system failure.

    Returns the episode of the last try; `trace.info["tries"]` lists the failures of the tries before it.
    """
    failures: list[str] = []
    max_tries = env.source.max_tries if max_tries is None else max_tries
    while True:
        episode = await run_attempt(
            env,
            task,
            policy=policy,
            gateway=gateway,
            id=id,
            group=group,
            attempt=attempt,
            seed=seed,
            train=train,
            on_progress=on_progress,
        )
        failure = next(filter(None, (find_system_failure(env, trace) for trace in episode.traces)), None)
        if failure is None or not failure.retryable or len(failures) + 1 >= max_tries:
            break
        failures.append(f"{failure.name}: {failure.message}")
    if failures:
        for trace in episode.traces:
            trace.info["tries"] = failures
    return episode


def find_system_failure(env: Environment, trace: Trace) -> Failure | None:
    """Return why a trace is no evidence about the policy, or None: a system failure, or a reward that did not run.

    Group rewards do not count: they are computed later.
    """
    failure = next((error for error in trace.errors if error.blame == "system"), None)
    if failure is None and any(trace.rewards.get(hook.name) is None for hook in env.hooks.rewards):
        return REWARD_MISSING
    return failure
