"""What a rollout offers to the code of its environment."""

import random
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ramify.env.task import Task
from ramify.trace import Trace

if TYPE_CHECKING:
    from ramify.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a plain OpenAI or Anthropic client reaches the policy of this rollout; its calls are branches too."""

    base_url: str  # ends in /v1
    api_key: str = field(repr=False)  # the rollout's secret
    model: str


@dataclass(slots=True)
class RolloutContext:
    """One rollout as its hooks, tools and user see it. They name the fields they want as parameters."""

    task: Task
    trace: Trace
    runtime: "Runtime | None" = None
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    state: SimpleNamespace = field(default_factory=SimpleNamespace)
    endpoint: Endpoint | None = None


CONTEXT_FIELDS = tuple(part.name for part in fields(RolloutContext))
