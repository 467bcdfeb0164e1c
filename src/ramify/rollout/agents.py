"""The trace of a further agent of a rollout."""

from typing import Any

from ramify.trace import Trace


def make_agent_trace(first: Trace, agent: str, rewards: dict[str, Any]) -> Trace:
    """Return an empty trace of another agent of the rollout to which `first` belongs; `rewards` are not scored yet."""
    return Trace(
        id=f"{first.id}-{agent}",
        episode=first.episode,
        group=first.group,
        attempt=first.attempt,
        agent=agent,
        env=first.env,
        task=first.task,
        rewards=rewards,
        harness=first.harness,
        runtime=first.runtime,
        sampler=first.sampler,
    )
