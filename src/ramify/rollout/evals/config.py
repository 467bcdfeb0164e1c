"""The configuration of `ramify eval`, of evals during training, and of `ramify validate`.

Importing it loads neither torch nor an environment.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ramify.core.config import Config, RunName
from ramify.infer.config import EngineConfig, InferenceConfig, ModelConfig, ServerConfig
from ramify.model.render.config import RendererConfig, TemplateRendererConfig
from ramify.rollout.config import SourceConfig, TimeoutsConfig
from ramify.rollout.envserver.config import ServedSourceConfig


class EvalConfig(SourceConfig):
    """Configuration of `ramify eval`: a source, a model, and the number of rollouts."""

    name: RunName = ""
    """Name of the run directory. Default: taskset, model and a hash of the run's identity."""
    output: Path = Path("outputs")
    """Directory for runs (-o)."""
    num_tasks: int = Field(default=50, ge=1)
    """Number of tasks, from the start of the taskset (-n)."""
    repetitions: int = Field(default=4, ge=1)
    """Rollouts per task (-r)."""
    concurrency: int = Field(default=32, ge=1)
    """Maximum rollouts in flight (-c)."""
    workers: int = Field(default=0, ge=0)
    """Number of worker processes. 0: run rollouts in this process."""
    hang_timeout: float = Field(default=30.0, gt=0)
    """Seconds for which environment code may block the event loop of this process or of a worker."""
    pass_threshold: float = 1.0
    """Minimum reward of a passing rollout, for pass@k and pass^k."""
    model: ModelConfig = ModelConfig()
    """The model to evaluate (-m)."""
    renderer: RendererConfig = TemplateRendererConfig()
    inference: InferenceConfig = EngineConfig()
    """The engine to start, or the addresses of running servers as `base_url` (-b)."""
    server: ServerConfig = ServerConfig(port=0)
    """Address of the started engine."""
    startup_timeout: float = Field(default=600.0, gt=0)
    """Seconds until the started engine must be ready."""
    client_type: Literal["auto", "tokens", "chat"] = "auto"
    """Use a server's token ids (`tokens`) or its chat endpoint (`chat`). `auto`: token ids if it returns them."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the API key of the endpoint, if it needs one."""

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that identify the run. Results of runs that differ in them are not comparable."""
        parts = {"taskset": self.taskset, "model": self.model.name, "harness": self.harness}
        return json.loads(json.dumps({**parts, "sampling": self.sampling.model_dump(mode="json")}, default=str))

    @property
    def source(self) -> SourceConfig:
        """The source's part of the configuration, named by the taskset's id."""
        names = SourceConfig.model_fields.keys() - {"name"}
        return SourceConfig(**{name: getattr(self, name) for name in names})

    def source_with_kept_workdirs(self, directory: Path) -> SourceConfig:
        """Return `source` with work directories that are kept; local runtimes have theirs below `directory`."""
        is_local: bool = self.runtime.get("id", "local") == "local"
        root = {"workdir_root": str(directory)} if is_local else {}
        return self.source.model_copy(update={"runtime": {**root, **self.runtime, "keep_workdir": True}})


class EndpointConfig(Config):
    """A model server that a source uses instead of the run's inference."""

    base_url: str
    """Root URL, for example `http://10.0.0.1:8000`."""
    model: str = ""
    """Name of the model on the server. Default: the first that the server lists."""
    api_key_env: str | None = None
    """Environment variable with the API key. None: no key is sent."""


class EvalSourceConfig(ServedSourceConfig):
    """`[[eval]]`: an environment to evaluate on, before the first step, every `interval` steps, and at the end."""

    num_tasks: int = Field(default=128, ge=1)
    """Number of tasks, from the start of the taskset."""
    repetitions: int = Field(default=1, ge=1)
    """Rollouts per task."""
    interval: int | None = Field(default=20, ge=1)
    """Steps between evals. None: only before the first and after the last step."""
    pass_threshold: float = 1.0
    """Minimum reward of a passing rollout, for pass@k and pass^k."""
    endpoint: EndpointConfig | None = None
    """Model server of its agents. Default: the run's inference."""
    hold_weights: bool | None = None
    """Do not update weights during the eval. Default: true if the run's engines serve it."""

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a hold of weights that the run does not serve."""
        if self.hold_weights and self.endpoint is not None:
            yield "hold_weights", "requires the run's inference; `endpoint` serves other weights"


class ValidateConfig(Config):
    """Configuration of `ramify validate`."""

    taskset: dict[str, Any]
    """The taskset's `id` and its options."""
    runtime: dict[str, Any] = {"id": "local"}
    """The runtime's `id` and its options."""
    python: str | None = None
    """The interpreter in which the taskset runs: a path, or the name of a virtual environment made by
    `ramify venv install`. Default: this one."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Number of tasks, from the start of the taskset (-n). Default: all of them, up to 10,000."""
    concurrency: int = Field(default=16, ge=1)
    """Maximum tasks checked at the same time (-c)."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds for the gold replies of a task."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    seed: int = 0
    """Seed of all randomness in hooks and rewards."""
