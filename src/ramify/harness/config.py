"""What a harness can be told; importable without anything that runs."""

from typing import Literal

from pydantic import Field

from ramify.config import Config
from ramify.env.mcp import McpServerConfig
from ramify.gateway.config import AGENT_TIMEOUT


class ExternalModelConfig(Config):
    """Another model than the policy, at an OpenAI-compatible endpoint. Its calls are recorded, never trained on."""

    base_url: str
    """Ends in `/v1`, as OpenAI's clients want it."""
    model: str
    api_key_env: str | None = None
    """The environment variable that holds the key; none is sent without it."""


class HarnessConfig(Config):
    """What every harness can be told."""

    id: str = "chat"
    timeout: float = Field(default=AGENT_TIMEOUT, gt=0)
    """Seconds the agent has for a task that does not say otherwise."""
    train: Literal["main", "all"] = "main"
    """Which calls are trained: those of the agent's conversations about the task, or all calls of the policy."""
    models: dict[str, ExternalModelConfig] = {}
    """Models that the agent may ask for by these names; every other name is answered by the policy."""


class ChatHarnessConfig(HarnessConfig):
    """The chat loop."""

    mcp: dict[str, McpServerConfig] = {}
    """MCP servers, by name, whose tools are offered beside those of the taskset; opened for each rollout."""
    malformed_limit: int = Field(default=3, ge=1)
    """Replies in a row with tool calls that cannot be read, after which the rollout is over."""
