"""What a source may say about its model calls: how tokens are chosen, and how many there may be."""

from __future__ import annotations

from pydantic import Field

from ramify.config import Config
from ramify.errors import ConfigInvalid

AGENT_TIMEOUT = 600.0  # seconds that an agent has for a task, unless its harness or the task sets another limit


class SamplingConfig(Config):
    """How tokens are chosen. In training this is all there is; elsewhere a client's own wishes come first."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one reply; by default what the model's context leaves."""
    seed: int | None = None
    """Makes a run repeatable; every call gets a seed of its own from it."""

    def check_trainable(self) -> None:
        """Refuse what would make the recorded logprobs other than those of the distribution sampled from."""
        wanted = {
            "temperature": (self.temperature > 0, "above 0"),
            "top_p": (self.top_p == 1, "1"),
            "top_k": (self.top_k == 0, "0"),
            "min_p": (self.min_p == 0, "0"),
        }
        wrong = [
            f"sampling.{key}: {getattr(self, key):g} cannot be trained on, expected {want}"
            for key, (fits, want) in wanted.items()
            if not fits
        ]
        if wrong:
            raise ConfigInvalid("\n".join(wrong))


class RolloutLimits(Config):
    """What one rollout may use. Tokens count as the trace holds them, each once however many calls saw it."""

    max_turns: int | None = Field(default=None, ge=1)
    """Model calls."""
    max_input_tokens: int | None = Field(default=None, ge=1)
    """Context tokens: everything that was not sampled."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Both together."""
    seq_len: int | None = Field(default=None, ge=1)
    """The longest path from the root to a leaf."""
