"""Configuration of the model calls of a source: sampling parameters and limits; where an agent makes its calls."""

from dataclasses import dataclass, field

from pydantic import Field

from ramify.core.config import Config
from ramify.core.errors import ConfigInvalid

REQUEST_TASK_PREFIX = "request of "  # the name of a task that serves a request of an agent; the rollout's id follows
MCP_PATH = "/mcp"  # of the MCP server, beneath the address of the policy
AGENT_TIMEOUT = 600.0  # seconds for an agent to finish a task, unless the harness or the task sets another limit


class SamplingConfig(Config):
    """Sampling parameters. In training only these apply; otherwise the client's parameters override them."""

    temperature: float = Field(default=1.0, ge=0)
    """0 always takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens with this total probability. 1 disables it."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many most likely tokens. 0 disables it."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens less likely than this fraction of the most likely one. 0 disables it."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of one reply; by default, what the model's context leaves."""
    seed: int | None = None
    """Makes sampling reproducible; each call derives its own seed from it."""

    def check_trainable(self) -> None:
        """Raise ConfigInvalid if rollouts with these parameters cannot be trained on."""
        if problems := self.find_training_problems():
            raise ConfigInvalid(problems=problems)

    def find_training_problems(self) -> list[tuple[str, str]]:
        """Return each parameter that would make the recorded logprobs differ from the sampled distribution."""
        rules = {
            "temperature": (self.temperature > 0, "above 0"),
            "top_p": (self.top_p == 1, "1"),
            "top_k": (self.top_k == 0, "0"),
            "min_p": (self.min_p == 0, "0"),
        }
        return [
            (f"sampling.{key}", f"{getattr(self, key):g} cannot be trained on, expected {expected}")
            for key, (is_valid, expected) in rules.items()
            if not is_valid
        ]


class RolloutLimits(Config):
    """Limits of one rollout. A token of the trace counts once, however many calls saw it."""

    max_turns: int | None = Field(default=None, ge=1)
    """Maximum number of model calls."""
    max_input_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of context tokens, which are all tokens that were not sampled."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of sampled tokens."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of context and sampled tokens together."""
    seq_len: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of a path from the root to a leaf."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an OpenAI or Anthropic client reaches the policy of a rollout. Its calls become branches of the trace.

    - `base_url`: the address; it ends in `/v1`.
    - `mcp_url`: the address of an MCP server with the tools of the rollout; the key is the same.
    - `api_key`: the secret of the rollout.
    - `model`: the name of the policy.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str

    @property
    def mcp_url(self) -> str:
        """The address of the MCP server."""
        return self.base_url + MCP_PATH
