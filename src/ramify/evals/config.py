"""What an eval can be told. Importable without torch, and without any environment."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ramify.config import RunName
from ramify.infer.config import EngineConfig, InferenceConfig, ModelConfig, ServerConfig
from ramify.render.config import RendererConfig, TemplateRendererConfig
from ramify.rollout.config import SourceConfig


class EvalConfig(SourceConfig):
    """`ramify eval`: a source, a model, and how much of it."""

    name: RunName = ""
    """The run's directory below `output`; by default taskset, model and a hash of what makes the run itself."""
    output: Path = Path("outputs")
    """Where runs lie (-o)."""
    num_tasks: int = Field(default=50, ge=1)
    """The first so many tasks (-n)."""
    repetitions: int = Field(default=4, ge=1)
    """Rollouts of each task (-r)."""
    concurrency: int = Field(default=32, ge=1)
    """Rollouts at the same time (-c)."""
    workers: int = Field(default=0, ge=0)
    """Worker processes that rollouts run in; 0 runs them in this one."""
    hang_timeout: float = Field(default=30.0, gt=0)
    """Seconds for which code of the environment may block the event loop, here or in a worker."""
    threshold: float = 1.0
    """The reward from which a rollout passes, for pass@k and pass^k."""
    model: ModelConfig = ModelConfig()
    """The model (-m)."""
    renderer: RendererConfig = TemplateRendererConfig()
    inference: InferenceConfig = EngineConfig()
    """The engine that is started; or `base_url`, servers that run already (-b)."""
    server: ServerConfig = ServerConfig(port=0)
    """Where a started engine listens."""
    start_deadline: float = Field(default=600.0, gt=0)
    """Seconds until a started engine has to answer."""
    client: Literal["auto", "tokens", "chat"] = "auto"
    """How a server is asked: for token ids, as a chat endpoint, or as it allows."""
    api_key_env: str = "OPENAI_API_KEY"
    """The variable that holds the key of an endpoint that wants one."""

    @property
    def identity(self) -> dict[str, Any]:
        """What makes this run itself: results under another one cannot be compared."""
        parts = {"taskset": self.taskset, "model": self.model.name, "harness": self.harness}
        return json.loads(json.dumps({**parts, "sampling": self.sampling.model_dump(mode="json")}, default=str))

    @property
    def source(self) -> SourceConfig:
        """The environment's part; its traces are called by the taskset's id."""
        names = SourceConfig.model_fields.keys() - {"name"}
        return SourceConfig(**{name: getattr(self, name) for name in names})

    def source_with_workdirs_in(self, directory: Path) -> SourceConfig:
        """The same, with the work directories of local runtimes made in `folder`."""
        is_local = self.runtime.get("id", "local") == "local"
        runtime = {"root": str(directory), **self.runtime} if is_local else self.runtime
        return self.source.model_copy(update={"runtime": runtime})
