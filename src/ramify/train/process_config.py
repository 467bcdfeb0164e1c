"""Configuration of `ramify trainer`. Importable without torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from ramify.core.config import Config, RunName, TcpAddress
from ramify.infer.config import ModelConfig
from ramify.train.config import CheckpointConfig, TrainerConfig
from ramify.train.weights_directory import get_weights_directory


class WeightsConfig(Config):
    """How engines get new weights from the trainer."""

    transport: Literal["auto", "disk", "shm", "ipc", "ipc+disk", "ipc+shm"] = "auto"
    """`disk`: directories below the run or its shared directory, for engines that reach this file system. `shm`:
    directories in memory, for engines on the same host. `ipc`: engines on the trainer's GPU copy its tensors, and a
    directory follows for some versions, or for all if other engines read it (`ipc+disk`, `ipc+shm`). `auto`: `ipc` on
    the trainer's GPU, `shm` on its host if the memory has room, else `disk`."""

    url: str | None = None
    """An object store to which published weights are copied, such as `s3://bucket/weights`, or another URL that fsspec
    knows. Native engines that do not find a directory fetch it from there, once per node."""

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a URL beside a transport through memory."""
        if self.url is not None and self.shares_memory:
            yield "url", f"not allowed with transport = {self.transport!r}; use 'disk'"

    @property
    def shares_memory(self) -> bool:
        """Whether engines beside the trainer copy weights from its memory."""
        return self.transport.startswith("ipc")

    @property
    def writes_every_version(self) -> bool:
        """Whether every version gets a directory, for engines that do not copy from the trainer's memory."""
        return self.transport != "ipc"

    @property
    def is_in_memory(self) -> bool:
        """Whether the directories are in the memory of the host, not on its disk."""
        return self.transport.endswith("shm")

    def url_for(self, run: Path) -> str | None:
        """Return the URL below which the versions of a run are; None without one."""
        return None if self.url is None else f"{self.url.rstrip('/')}/{run.name}"

    def directory_for(self, run: Path, shared: Path | None = None) -> Path:
        """Return the directory of the published versions of a run, which may have a shared directory."""
        return get_weights_directory(run, "shm" if self.is_in_memory else "disk", shared)


class TrainerProcessConfig(Config):
    """`ramify trainer`: trains the batches of an orchestrator, or of a directory of recorded ones."""

    name: RunName = "trainer"
    """The run's directory below `output`, for checkpoints and weights."""
    output: Path = Path("outputs")
    """The directory of all runs (-o)."""
    shared_directory: Path | None = None
    """The run's directory on storage that all nodes reach, for checkpoints, weights and images. Default: `output` and
    `name`."""
    address: TcpAddress | None = None
    """Address of the orchestrator, tcp://HOST:PORT."""
    secret_env: str = "RAMIFY_SECRET"
    """Environment variable with the shared secret, required if other machines can reach the address."""
    orchestrator_timeout: float = Field(default=3600.0, gt=0)
    """Seconds to wait for a batch, or for an orchestrator that does not answer, before the trainer fails."""
    model: ModelConfig = ModelConfig()
    """The model to start from (-m)."""
    seed: int = 0
    """Seed of the adapters' initial weights."""
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.output / self.name

    @property
    def storage_path(self) -> Path:
        """The directory with the run's checkpoints, images and token stats."""
        return self.shared_directory or self.path

    @property
    def weights_directory(self) -> Path:
        """The directory of the published weights."""
        return self.weights.directory_for(self.path, self.shared_directory)
