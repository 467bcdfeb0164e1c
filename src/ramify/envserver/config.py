"""What an env server can be told. Importable without torch, and without any environment."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from ramify.config import Config, raise_config_invalid
from ramify.infer.config import ExternalConfig, ModelConfig
from ramify.render.config import RendererConfig, TemplateRendererConfig
from ramify.rollout.config import SourceConfig
from ramify.wire.settings import WireSettings

DEFAULT_ADDRESS = "tcp://127.0.0.1:0"


def count_available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ElasticPoolConfig(Config):
    """As many workers as the load needs."""

    type: Literal["elastic"] = "elastic"
    min: int = Field(default=1, ge=1)
    max: int | None = Field(default=None, ge=1)
    """By default one for each core."""
    multiplex: int = Field(default=128, ge=1)
    """Attempts that one worker runs at the same time."""
    idle: float = Field(default=30.0, gt=0)
    """Seconds for which a worker has to be one too many before it is stopped."""

    @property
    def max_workers(self) -> int:
        """The largest number of workers."""
        return self.max or max(self.min, count_available_cores())

    @model_validator(mode="after")
    def _max_must_be_at_least_min(self) -> "ElasticPoolConfig":
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max must be at least min, found {self.max} < {self.min}")
        return self


class StaticPoolConfig(Config):
    """A fixed number of workers."""

    type: Literal["static"] = "static"
    workers: int = Field(default=4, ge=1)


PoolConfig = Annotated[ElasticPoolConfig | StaticPoolConfig, Field(discriminator="type")]


class ServedSourceConfig(SourceConfig):
    """A source with a server of its own."""

    pool: PoolConfig = ElasticPoolConfig()
    address: str | None = None
    """Where its server listens, for one that you run yourself; by default a free port of this machine."""

    @property
    def source_config(self) -> SourceConfig:
        """The environment's part."""
        return SourceConfig(**{name: getattr(self, name) for name in SourceConfig.model_fields})

    @property
    def source_name(self) -> str:
        return self.name or str(self.taskset.get("id", ""))


class EnvServerConfig(Config):
    """`ramify env-server`: one source, the model its agents ask, and the rules its workers live by."""

    train: list[ServedSourceConfig] = []
    eval: list[ServedSourceConfig] = []
    source: str | None = None
    """The one to serve, `train/NAME` or `eval/NAME`; needed only where there are several."""
    model: ModelConfig = ModelConfig()
    renderer: RendererConfig = TemplateRendererConfig()
    inference: ExternalConfig
    """The servers that workers sample from."""
    client: Literal["auto", "tokens", "chat"] = "auto"
    """How they are asked: for token ids, as a chat endpoint, or as they allow."""
    api_key_env: str = "OPENAI_API_KEY"
    """The variable that holds the key of an endpoint that wants one."""
    secret_env: str | None = None
    """The variable that holds the secret which clients have to know; required for an address others can reach."""
    output: Path = Path("outputs")
    """The run's directory (-o); the log is `logs/env/train/NAME.log` or `logs/env/eval/NAME.log` in it."""
    address_file: Path | None = None
    """A file that the real address is written to."""
    queue: int = Field(default=8192, ge=1)
    """Requests that may be open; one more is refused."""
    crashes: int = Field(default=3, ge=1)
    """Workers that may be lost under one attempt before it fails as WorkerDied."""
    boot_timeout: float = Field(default=120.0, gt=0)
    """Seconds for a worker to be ready; half of them are for the servers it asks to be there."""
    boot_attempts: int = Field(default=3, ge=1)
    """Workers in a row that may fail to boot before the server says so and slows down."""
    hang_timeout: float = Field(default=30.0, gt=0)
    """Seconds for which a worker's event loop may stand still."""
    max_memory: float | None = Field(default=None, gt=0)
    """MiB of a worker above which it is replaced."""
    max_age: float | None = Field(default=None, gt=0)
    """Seconds after which a worker is replaced."""
    grace: float = Field(default=10.0, ge=0)
    """Seconds that attempts in flight get to finish when the server or a worker stops."""
    reconnect: float = Field(default=30.0, gt=0)
    """Seconds after which a client that is not heard is forgotten and its attempts cancelled."""
    heartbeat: float = Field(default=1.0, gt=0)
    """Seconds between two heartbeats."""

    @field_validator("train", "eval")
    @classmethod
    def _source_names_must_be_unique(cls, sources: list[ServedSourceConfig]) -> list[ServedSourceConfig]:
        names = [source.source_name for source in sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two sources are called {name!r}; give them names of their own")
        return sources

    @property
    def wire_settings(self) -> WireSettings:
        """The times of its connections."""
        patience = max(10.0, 5 * self.heartbeat)
        return WireSettings(
            heartbeat_interval=self.heartbeat,
            server_timeout=patience,
            session_timeout=self.reconnect,
            max_open_requests=self.queue,
        )

    def load_secret(self) -> str | None:
        """The secret that clients have to know; ConfigInvalid where its variable is not set."""
        if self.secret_env is None:
            return None
        found = os.environ.get(self.secret_env)
        if not found:
            raise_config_invalid([("secret_env", f"the variable {self.secret_env} is not set")])
        return found

    def select_source(self) -> "SelectedSource":
        """The source to serve; ConfigInvalid unless it is clear which."""
        sources_by_key = {f"train/{source.source_name}": source for source in self.train} | {
            f"eval/{one.source_name}": one for one in self.eval
        }
        if not sources_by_key:
            raise_config_invalid([("train", "a server needs a source: add [[train]] or [[eval]]")])
        listed = ", ".join(sources_by_key)
        if self.source is None:
            if len(sources_by_key) > 1:
                raise_config_invalid([("source", f"there are several; pick one of {listed}")])
            return SelectedSource(*next(iter(sources_by_key.items())))
        if self.source not in sources_by_key:
            raise_config_invalid([("source", f"there is no {self.source!r}; there is {listed}")])
        return SelectedSource(self.source, sources_by_key[self.source])


class SelectedSource:
    """One source and the name by which it was picked."""

    def __init__(self, key: str, config: ServedSourceConfig) -> None:
        self.key, self.config = key, config
        self.kind, _, self.source_name = key.partition("/")

    def log_path(self, output: Path) -> Path:
        """The file its server writes."""
        return output / "logs" / "env" / self.kind / f"{self.source_name.strip('/').replace('/', '-')}.log"
