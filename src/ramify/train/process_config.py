"""What `ramify trainer` can be told. Importable without torch."""

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from ramify.config import Config, RunName
from ramify.infer.config import ModelConfig
from ramify.train.config import CheckpointConfig, TrainerConfig
from ramify.train.weights_directory import get_weights_directory


class WeightsConfig(Config):
    """How new weights travel to the engines."""

    transport: Literal["disk", "shm"] = "disk"
    """`disk`: below the run, for engines anywhere that see it. `shm`: in memory, for engines on the same host."""

    def directory_for(self, run: Path) -> Path:
        """Where a run's versions lie."""
        return get_weights_directory(run, self.transport)


class TrainerProcessConfig(Config):
    """`ramify trainer`: trains what an orchestrator, or a directory of recorded batches, gives it."""

    name: RunName = "trainer"
    """The run's directory below `output`: checkpoints and weights lie there."""
    output: Path = Path("outputs")
    """Where runs lie (-o)."""
    address: str | None = None
    """Of the orchestrator: tcp://HOST:PORT."""
    secret_env: str = "RAMIFY_SECRET"
    """The variable that holds the secret of an address that other machines can reach."""
    patience: float = Field(default=3600.0, gt=0)
    """Seconds to wait for a batch, or for an orchestrator that is gone, before giving up by name."""
    model: ModelConfig = ModelConfig()
    """The model to begin with (-m)."""
    seed: int = 0
    """Of adapters."""
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()

    @field_validator("address")
    @classmethod
    def _address_is_tcp(cls, address: str | None) -> str | None:
        place = urlsplit(address or "tcp://nobody:1")
        if place.scheme != "tcp" or not place.hostname or not place.port:  # a port that is none raises
            raise ValueError(f"expected tcp://HOST:PORT, got {address!r}")
        return address

    @property
    def path(self) -> Path:
        return self.output / self.name
