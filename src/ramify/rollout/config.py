"""What a source of rollouts can be told: which environment, how it is sampled, how much an attempt may use."""

from typing import Any

from pydantic import Field

from ramify.config import Config
from ramify.gateway.config import AGENT_TIMEOUT, RolloutLimits, SamplingConfig


class TimeoutsConfig(Config):
    """Seconds for each phase around the agent; the agent's own limit is `harness.timeout`."""

    load: float = Field(default=300.0, gt=0)
    """For `load` to return the requested tasks."""
    boot: float = Field(default=120.0, gt=0)
    setup: float = Field(default=120.0, gt=0)
    finalize: float = Field(default=120.0, gt=0)
    scoring: float = Field(default=300.0, gt=0)
    """For all rewards and metrics together."""
    engine_stall: float = Field(default=600.0, gt=0)
    """For all waits of the agent for an engine that makes no progress, together. They do not count towards
    `harness.timeout`; if a rollout has to wait longer, it fails with EngineStalled."""


class SourceConfig(Config):
    """An environment and the way it is run."""

    name: str = ""
    """What its traces call it; the taskset's id unless given."""
    taskset: dict[str, Any]
    harness: dict[str, Any] = {"id": "chat"}
    runtime: dict[str, Any] = {"id": "local"}
    sampling: SamplingConfig = SamplingConfig()
    max_turns: int | None = Field(default=None, ge=1)
    """Model calls of one rollout."""
    max_input_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one rollout that were not sampled."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one rollout that were."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Both together."""
    seq_len: int | None = Field(default=None, ge=1)
    """The longest path from the root of a trace to a leaf, in tokens."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    attempts: int = Field(default=3, ge=1)
    """How often a rollout is started before what happened to it counts as its result."""
    model_retries: int = Field(default=3, ge=0)
    """How often a single model call is made again after a failure that may pass."""

    def max_attempt_seconds(self, task_timeout: float | None = None) -> float:
        """Return the seconds that one attempt may take, all phases and the engine's stalls together.

        `task_timeout` is the limit of the task itself, which replaces that of the harness.
        """
        timeouts = self.timeouts
        agent = task_timeout or float(self.harness.get("timeout", AGENT_TIMEOUT))
        return timeouts.boot + timeouts.setup + agent + timeouts.engine_stall + timeouts.finalize + timeouts.scoring

    @property
    def limits(self) -> RolloutLimits:
        """What one rollout may use."""
        return RolloutLimits(**{name: getattr(self, name) for name in RolloutLimits.model_fields})
