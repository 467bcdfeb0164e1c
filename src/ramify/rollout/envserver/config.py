"""Configuration of env servers; importable without torch and without any environment."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from ramify.core.config import Config, TcpAddress
from ramify.core.errors import ConfigInvalid
from ramify.infer.config import ExternalServersConfig, ModelConfig
from ramify.model.render.config import RendererConfig, TemplateRendererConfig
from ramify.processes.wire.message import WireSettings
from ramify.rollout.config import SourceConfig, check_source_names

DEFAULT_ADDRESS = "tcp://127.0.0.1:0"


def count_available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # macOS has no affinity
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ElasticPoolConfig(Config):
    """Worker processes whose number follows the load."""

    type: Literal["elastic"] = "elastic"
    min_workers: int = Field(default=1, ge=1)
    """Minimum number of worker processes."""
    max_workers: int | None = Field(default=None, ge=1)
    """Maximum number of worker processes; by default one per core."""
    multiplex: int = Field(default=128, ge=1)
    """Attempts that one worker process runs at the same time."""
    idle_timeout: float = Field(default=30.0, gt=0)
    """Seconds a surplus worker stays idle before it is stopped."""

    @property
    def worker_limit(self) -> int:
        """The largest number of workers: `max_workers`, or else one per core."""
        return self.max_workers or max(self.min_workers, count_available_cores())

    @model_validator(mode="after")
    def _max_workers_is_at_least_min_workers(self) -> "ElasticPoolConfig":
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers must be at least min_workers, found {self.max_workers} < {self.min_workers}")
        return self


class StaticPoolConfig(Config):
    """A fixed number of worker processes."""

    type: Literal["static"] = "static"
    workers: int = Field(default=4, ge=1)
    """Number of worker processes."""


PoolConfig = Annotated[ElasticPoolConfig | StaticPoolConfig, Field(discriminator="type")]


class ServedSourceConfig(SourceConfig):
    """A source of rollouts: an environment, and the worker processes that run it."""

    pool: PoolConfig = ElasticPoolConfig()
    """The worker processes of its env server."""
    address: TcpAddress | list[TcpAddress] | None = None
    """Address of the env server if you run it yourself, or of several that share the load. Default: the run starts one,
    on a free port."""

    @field_validator("address")
    @classmethod
    def _list_of_addresses_is_not_empty(cls, address: str | list[str] | None) -> str | list[str] | None:
        if isinstance(address, list) and (not address or len(set(address)) < len(address)):
            raise ValueError(f"expected one or more different addresses, got {address}")
        return address

    @property
    def addresses(self) -> list[str]:
        """The addresses of the env servers, as far as they are set."""
        return [self.address] if isinstance(self.address, str) else self.address or []

    @property
    def source_config(self) -> SourceConfig:
        """The source without the settings of its server."""
        return SourceConfig(**{name: getattr(self, name) for name in SourceConfig.model_fields})


class EnvServerConfig(Config):
    """Configuration of `ramify env-server`: one source, the model of its agents, and the limits of its workers."""

    train: list[ServedSourceConfig] = []
    eval: list[ServedSourceConfig] = []
    source: str | None = None
    """The source to serve, `train/NAME` or `eval/NAME`; required only if there are several."""
    model: ModelConfig = ModelConfig()
    """The model that the inference servers serve (-m)."""
    served_model: str | None = None
    """The model's name on the servers, if it differs from `model.name`. Empty: whatever they serve."""
    renderer: RendererConfig = TemplateRendererConfig()
    inference: ExternalServersConfig
    """The servers that workers sample from."""
    client_type: Literal["auto", "tokens", "chat"] = "auto"
    """Use the servers' token ids (`tokens`) or their chat endpoint (`chat`). `auto`: token ids if they return them."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable with the API key of the inference servers, if they need one."""
    secret_env: str | None = None
    """The environment variable with the secret that clients need; required for an address that other machines can
    reach."""
    output: Path = Path("outputs")
    """The run directory (-o); the log is `logs/env/train/NAME.log` or `logs/env/eval/NAME.log` in it."""
    log_file: Path | None = None
    """Another file for the log, such as /dev/stdout."""
    address_file: Path | None = None
    """A file to write the listening address to, for scripts that use port 0."""
    max_open_requests: int = Field(default=8192, ge=1)
    """Maximum requests in flight; further ones are refused."""
    max_worker_crashes: int = Field(default=3, ge=1)
    """Crashed workers after which the attempt that ran on each of them fails with ProcessDied."""
    worker_startup_timeout: float = Field(default=120.0, gt=0)
    """Seconds until a worker must be ready; up to half may be spent waiting for the inference servers."""
    max_startup_failures: int = Field(default=3, ge=1)
    """Failed starts of workers in a row after which the server reports that it is broken."""
    hang_timeout: float = Field(default=30.0, gt=0)
    """Seconds for which environment code may block a worker's event loop; then it counts as hung and is replaced."""
    max_memory_mib: float | None = Field(default=None, gt=0)
    """Memory of a worker, in MiB, above which it is replaced. None: no limit."""
    max_age: float | None = Field(default=None, gt=0)
    """Age of a worker, in seconds, at which it is replaced. None: no limit."""
    shutdown_timeout: float = Field(default=10.0, ge=0)
    """Seconds that running attempts get to finish when the server or a worker stops."""
    client_timeout: float = Field(default=30.0, gt=0)
    """Seconds without a heartbeat after which a client is dropped and its attempts are cancelled."""
    heartbeat_interval: float = Field(default=1.0, gt=0)
    """Seconds between two heartbeats."""

    _source_names_must_be_unique = field_validator("train", "eval")(check_source_names)

    @property
    def wire_settings(self) -> WireSettings:
        """The settings of the server's connections."""
        return WireSettings(
            heartbeat_interval=self.heartbeat_interval,
            server_timeout=max(10.0, 5 * self.heartbeat_interval),
            session_timeout=self.client_timeout,
            max_open_requests=self.max_open_requests,
        )

    def load_secret(self) -> str | None:
        """Return the secret that clients need, or None. Raises ConfigInvalid if the variable is not set."""
        if self.secret_env is None:
            return None
        secret = os.environ.get(self.secret_env)
        if not secret:
            raise ConfigInvalid(f"the variable {self.secret_env} is not set", key="secret_env")
        return secret

    def select_source(self) -> "SelectedSource":
        """Return the source to serve. Raises ConfigInvalid if there is none or `source` does not select one."""
        kinds = {"train": self.train, "eval": self.eval}
        sources_by_key = {f"{kind}/{source.source_name}": source for kind in kinds for source in kinds[kind]}
        if not sources_by_key:
            raise ConfigInvalid("a server needs a source: add [[train]] or [[eval]]", key="train")
        listed = ", ".join(sources_by_key)
        if self.source is None:
            if len(sources_by_key) > 1:
                raise ConfigInvalid(f"there are several sources; select one of {listed}", key="source")
            return SelectedSource(*next(iter(sources_by_key.items())))
        if self.source not in sources_by_key:
            raise ConfigInvalid(f"unknown source {self.source!r}; expected one of {listed}", key="source")
        return SelectedSource(self.source, sources_by_key[self.source])


class SelectedSource:
    """One source and the key that selects it, `train/NAME` or `eval/NAME`: its `kind` and `source_name`."""

    def __init__(self, key: str, config: ServedSourceConfig) -> None:
        self.key, self.config = key, config
        self.kind, _, self.source_name = key.partition("/")

    @property
    def listen_address(self) -> str:
        """The address to listen at. Raises ConfigInvalid if the source has several."""
        addresses = self.config.addresses
        if len(addresses) > 1:
            flag = f"--{self.kind}.NUMBER.address {addresses[0]}"
            raise ConfigInvalid(f"{self.key} has {len(addresses)} env servers; select one with {flag}", key="address")
        return addresses[0] if addresses else DEFAULT_ADDRESS

    def log_path(self, output: Path) -> Path:
        """Return the path of the server's log."""
        return output / "logs" / "env" / self.kind / f"{self.source_name.strip('/').replace('/', '-')}.log"
