"""The fields of a rollout that hooks, tools and users can name as parameters."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ramify.env.task import Task
from ramify.infer.gateway.config import Endpoint
from ramify.trace import Trace

if TYPE_CHECKING:
    from ramify.env.runtime import Runtime


@dataclass(frozen=True, slots=True)
class RolloutAgent:
    """One of several agents of a rollout.

    - `trace`: its trace; `trace.agent` is its name.
    - `endpoint`: where it calls the policy.
    """

    trace: Trace
    endpoint: Endpoint


@dataclass(slots=True)
class RolloutContext:
    """One rollout as its hooks, tools and user see it. They name the fields they need as parameters.

    - `task`: the task that the agent works on.
    - `trace`: the trace recorded so far; `trace.info` takes values of the environment.
    - `runtime`: runs programs and accesses files in the rollout's work directory; None outside of a rollout.
    - `rng`: a generator seeded by the rollout; use it for all randomness.
    - `state`: an empty namespace in which the hooks of a rollout share values.
    - `endpoint`: the HTTP endpoint of the policy; None if the rollout has no gateway.
    - `add_agent`: takes a name and returns a new `RolloutAgent`, with a trace and an endpoint of its own; None if the
      rollout has no gateway. The first one has the rollout's own trace. Rewards and metrics run once for each agent.
    """

    task: Task
    trace: Trace
    runtime: "Runtime | None" = None
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    state: SimpleNamespace = field(default_factory=SimpleNamespace)
    endpoint: Endpoint | None = None
    add_agent: Callable[[str], RolloutAgent] | None = None


CONTEXT_FIELDS = tuple(context_field.name for context_field in fields(RolloutContext))
