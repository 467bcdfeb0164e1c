"""Repeat an attempt that ended with a system failure. Whoever asked for an attempt repeats it; env servers do not."""

from collections.abc import Awaitable, Callable, Sequence

from ramify.core.errors import Failure
from ramify.rollout.environment import Environment
from ramify.trace import Trace

REWARD_MISSING = Failure("EnvironmentFault", "a reward did not run", "system", True)


async def repeat_attempt(run: Callable[[], Awaitable[Sequence[Trace]]], env: Environment) -> Sequence[Trace]:
    """Call `run`, which runs one attempt, until it ends without a system failure, at most `max_tries` times.

    Returns the traces of the last try; `trace.info["tries"]` lists the failures of the tries before it.
    """
    failures: list[str] = []
    while True:
        traces = await run()
        failure = next(filter(None, (find_system_failure(env, trace) for trace in traces)), None)
        if failure is None or not failure.retryable or len(failures) + 1 >= env.source.max_tries:
            break
        failures.append(f"{failure.name}: {failure.message}")
    if failures:
        for trace in traces:
            trace.info["tries"] = failures
    return traces


def find_system_failure(env: Environment, trace: Trace) -> Failure | None:
    """Return why a trace says nothing about the policy (a system failure, or a reward that did not run), or None.

    Group rewards do not count: they are computed later.
    """
    failure = next((error for error in trace.errors if error.blame == "system"), None)
    if failure is None and any(trace.rewards.get(hook.name) is None for hook in env.hooks.rewards):
        return REWARD_MISSING
    return failure
