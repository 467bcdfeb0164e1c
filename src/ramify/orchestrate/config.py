"""The configuration of a run, whole: `ramify rl`, and each of its parts, read this.

Importable without torch and without any environment. A key that would do nothing beside the others is an error.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ramify.config import Config, RunName
from ramify.envserver.config import ElasticPoolConfig, ServedSourceConfig
from ramify.errors import ConfigInvalid
from ramify.infer.config import EngineConfig, InferenceConfig, ModelConfig
from ramify.orchestrate.admission import AdmissionLimits
from ramify.orchestrate.curriculum import PoolsConfig, ShuffleConfig
from ramify.render.config import RendererConfig, TemplateRendererConfig
from ramify.store.run_name import default_run_name
from ramify.train.config import CheckpointConfig, TrainerConfig
from ramify.train.process_config import WeightsConfig

CurriculumConfig = Annotated[ShuffleConfig | PoolsConfig, Field(discriminator="type")]


class EndpointConfig(Config):
    """A model server of a source's own, in place of the run's."""

    base_url: str
    """Its root, such as `http://10.0.0.1:8000`."""
    model: str = ""
    """What it calls the model; by default the first it names."""
    api_key_env: str | None = None
    """The variable that holds its key; none is sent without it."""


class RunSourceConfig(ServedSourceConfig):
    """An environment of the run, served by an env server that the run starts or finds at `address`."""

    endpoint: EndpointConfig | None = None
    """Where its agents' model calls go; by default to the run's inference."""

    @model_validator(mode="after")
    def _pool_requires_managed_server(self) -> "RunSourceConfig":
        if self.address is not None and self.pool != ElasticPoolConfig():
            raise ValueError("pool needs a server that the run starts; the one at `address` has its own")
        return self


class TrainSourceConfig(RunSourceConfig):
    """`[[train]]`: an environment to learn from."""

    ratio: float = Field(default=1.0, gt=0)
    """Its share of the groups, as a ratio to those of the other sources."""
    group_size: int | None = Field(default=None, ge=1)
    """Attempts at each of its tasks; by default `orchestrator.group_size`."""
    algorithm: dict[str, Any] = {"id": "grpo"}
    """grpo, dr_grpo, rloo, max_rl or a plugin, with its keys."""
    curriculum: CurriculumConfig = ShuffleConfig()

    @field_validator("algorithm")
    @classmethod
    def _default_algorithm_to_grpo(cls, table: dict[str, Any]) -> dict[str, Any]:
        return {"id": "grpo", **table}

    @model_validator(mode="after")
    def _sampling_must_be_trainable(self) -> "TrainSourceConfig":
        try:
            self.sampling.check_trainable()
        except ConfigInvalid as error:
            raise ValueError(error.message) from error
        return self


class EvalSourceConfig(RunSourceConfig):
    """`[[eval]]`: an environment to be measured by, before the first step, now and then, and at the end."""

    num_tasks: int = Field(default=128, ge=1)
    """The first so many tasks."""
    repetitions: int = Field(default=1, ge=1)
    """Rollouts of each task."""
    interval: int | None = Field(default=20, ge=1)
    """Steps between two evals; None leaves the first and the last."""
    threshold: float = 1.0
    """The reward from which a rollout passes, for pass@k and pass^k."""
    hold_weights: bool | None = None
    """Delay new weights until the eval's calls are done; by default where the run's engines serve it."""

    @model_validator(mode="after")
    def _hold_weights_requires_run_inference(self) -> "EvalSourceConfig":
        if self.hold_weights and self.endpoint is not None:
            raise ValueError("hold_weights needs the run's own inference; `endpoint` serves other weights")
        return self


class OrchestratorConfig(Config):
    """How rollouts become batches."""

    batch_size: int = Field(default=128, ge=1)
    """Rollouts of a step, a multiple of `group_size`."""
    group_size: int = Field(default=16, ge=1)
    """Attempts at each task."""
    min_group: int = Field(default=2, ge=1)
    """A group with fewer attempts left is dropped."""
    max_off_policy: int = Field(default=8, ge=0)
    """Most steps between the weights a group starts with and those trained on it; 0 samples and trains in turns."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Attempts at once; None is as many as `max_off_policy` lets be active. Below it the engines' load decides."""
    filters: list[dict[str, Any]] = [
        {"id": "gibberish"},
        {"id": "repetition"},
        {"id": "zero_advantage", "mode": "enforce"},
    ]
    """What is not trained on: gibberish, repetition, zero_advantage or plugins, with their keys."""
    patience: int | None = Field(default=256, ge=1)
    """Groups dropped in a row, without one to train on, after which `on_no_signal` applies; None: never."""
    on_no_signal: Literal["end", "warn"] = "end"
    """What happens then: `end` ends the run as `NoTrainableGroups`, `warn` reports it and continues."""
    stall_timeout: float = Field(default=1800.0, gt=0)
    """Seconds without progress after which the run fails, saying what is missing."""
    address: str = "tcp://127.0.0.1:0"
    """Where the trainer finds it; port 0 is any that is free, which `ramify rl` tells the trainer."""
    status: str = "http://127.0.0.1:0"
    """Where it says how the run is; port 0 is any that is free."""
    allowed_hosts: list[str] = []
    """Host names under which `/stop` of the status address answers, besides the host of `status`, addresses, names
    without a dot and this machine's own name."""

    @model_validator(mode="after")
    def _batch_size_is_multiple_of_group_size(self) -> "OrchestratorConfig":
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size must be a multiple of group_size: {self.batch_size}, {self.group_size}")
        return self

    @property
    def admission_limits(self) -> AdmissionLimits:
        """Groups of a batch, slots and window."""
        return AdmissionLimits.from_max_staleness(self.batch_size // self.group_size, self.max_off_policy)


class LaunchConfig(Config):
    """How the processes of a run are started and kept alive."""

    gpus: Literal["auto", "split", "shared"] = "auto"
    """Engine and trainer on GPUs of their own, or on the same; `auto` splits where there are two."""
    trainer_gpus: int = Field(default=1, ge=1)
    """GPUs of the trainer, with a process for each, where they are split."""
    base_port: int = Field(default=0, ge=0, le=60000)
    """Train source i listens at base + i, eval source i at base + 1000 + i; 0 takes any free port."""
    start_deadline: float = Field(default=600.0, gt=0)
    """Seconds until every process has to be ready."""
    hang_timeout: float = Field(default=60.0, gt=0)
    """Seconds without an answer after which the orchestrator counts as hung: it is killed and started again."""
    restarts: int = Field(default=10, ge=0)
    """Processes that may be started again before the run gives up."""
    grace: float = Field(default=120.0, gt=0)
    """Seconds for a last checkpoint when the run is asked to end."""


class WandbConfig(Config):
    """Weights & Biases."""

    type: Literal["wandb"] = "wandb"
    project: str = "ramify"
    entity: str | None = None


class TrackioConfig(Config):
    """Trackio."""

    type: Literal["trackio"] = "trackio"
    project: str = "ramify"


class TensorboardConfig(Config):
    """Event files in the run's directory."""

    type: Literal["tensorboard"] = "tensorboard"


SinkConfig = Annotated[WandbConfig | TrackioConfig | TensorboardConfig, Field(discriminator="type")]


class RolloutSamplesConfig(Config):
    """Rollouts that are shown as they are."""

    interval: int = Field(default=20, ge=1)
    """Steps between two looks."""
    count: int = Field(default=2, ge=0)
    """Rollouts of each source; 0 shows none."""


class MonitorConfig(Config):
    """Where metrics go besides the run's own tables."""

    sinks: list[SinkConfig] = []
    samples: RolloutSamplesConfig = RolloutSamplesConfig()


class RunConfig(Config):
    """`ramify rl`."""

    name: RunName = ""
    """The run's directory below `output`; by default taskset, model and a hash of what makes the run itself."""
    output: Path = Path("outputs")
    """Where runs lie (-o)."""
    max_steps: int = Field(default=100, ge=1)
    seq_len: int = Field(default=2048, ge=2)
    """The longest path from the root of a trace to a leaf, in tokens, that is sampled or trained."""
    seed: int = 0
    """Of the order of tasks and of everything sampled."""
    secret_env: str = "RAMIFY_SECRET"
    """The variable that holds the secret of all the run's connections; needed where other machines can reach one."""
    record: bool = False
    """Keep every batch as the trainer gets it, in the run's `batches/`, for `ramify trainer --replay`."""
    model: ModelConfig = ModelConfig()
    """The model (-m)."""
    renderer: RendererConfig = TemplateRendererConfig()
    inference: InferenceConfig = EngineConfig()
    """The engine that is started; or `base_url`, servers that run already (-b)."""
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    train: list[TrainSourceConfig] = Field(min_length=1)
    eval: list[EvalSourceConfig] = []
    launch: LaunchConfig = LaunchConfig()
    monitor: MonitorConfig = MonitorConfig()

    @model_validator(mode="after")
    def _source_names_must_be_unique(self) -> "RunConfig":
        for kind, sources in (("train", self.train), ("eval", self.eval)):
            names = [source.source_name for source in sources]
            for number, (source, name) in enumerate(zip(sources, names)):
                if names.count(name) > 1:
                    raise ValueError(f"two {kind} sources are called {name!r}; give them names of their own")
                if source.seq_len is not None and source.seq_len > self.seq_len:
                    said = f"{source.seq_len} is longer than the run's seq_len, {self.seq_len}"
                    raise ValueError(f"{kind}.{number}.seq_len: {said}")
        return self

    def get_group_size(self, source: TrainSourceConfig) -> int:
        """Attempts at each task of a source."""
        return source.group_size or self.orchestrator.group_size

    def with_default_seq_len(self, source: RunSourceConfig) -> RunSourceConfig:
        """The source with the run's own limit where it has none."""
        return source if source.seq_len is not None else source.model_copy(update={"seq_len": self.seq_len})

    @property
    def identity(self) -> dict[str, Any]:
        """What makes this run itself: a run with another one is another run."""
        sources = {
            source.source_name: {
                "taskset": source.taskset,
                "harness": source.harness,
                "sampling": source.sampling.model_dump(mode="json"),
            }
            for source in self.train
        }
        return json.loads(json.dumps({"model": self.model.name, "train": sources}, default=str))

    @property
    def secret(self) -> str | None:
        """What only those who belong to the run know; None where there is nothing to hide."""
        return os.environ.get(self.secret_env) or None

    @property
    def path(self) -> Path:
        """The run's directory."""
        titles = "+".join(source.source_name for source in self.train)
        return self.output / (self.name or default_run_name(titles, self.model.name, self.identity))
