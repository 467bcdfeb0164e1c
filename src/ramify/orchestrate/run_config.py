"""The configuration of a run: `ramify rl` and the commands of its processes read it.

It can be imported without torch and without any environment. A key that has no effect beside the others is an error.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from ramify.core.config import Config, HttpAddress, RunName, TcpAddress
from ramify.core.names import suggest
from ramify.env.chat_client import RUN_MODEL_PREFIX
from ramify.env.plugin import PLUGIN_KINDS
from ramify.infer.config import (
    EngineConfig,
    ExternalServersConfig,
    InferenceConfig,
    NamedModelConfig,
    VLLMConfig,
)
from ramify.model.render.config import RendererConfig, TemplateRendererConfig
from ramify.orchestrate.admission import AdmissionLimits
from ramify.orchestrate.cluster_config import ClusterConfig, EnginePlacementConfig
from ramify.orchestrate.curriculum import DifficultyConfig, ShuffleConfig
from ramify.orchestrate.launch_config import LaunchConfig
from ramify.rollout.config import SharedSourceSettings, check_source_names
from ramify.rollout.envserver.config import ElasticPoolConfig, ServedSourceConfig
from ramify.rollout.evals.config import EndpointConfig, EvalSourceConfig
from ramify.run.lookup import default_run_name
from ramify.train.config import (
    CheckpointConfig,
    TrainedModelConfig,
    TrainerConfig,
    WeightsConfig,
    dump_lora_identity,
    find_quantize_problems,
)

START_REFERENCE = "start"  # the reference that is the model a run starts from
DEFAULT_ALGORITHM = {"id": "grpo"}
TEACHER_ALGORITHMS = ("opd", "sft")
MODEL_NAME = re.compile(r"[A-Za-z0-9_-]+")  # also the name of a process, of a file and of a variable
LOCAL_LAUNCH_KEYS = {  # keys of `launch` for one machine, and what to set instead for a cluster
    "gpu_placement": "engines and trainer have separate GPUs there",
    "base_port": "ports are chosen on each node",
}
EXIT_RESUMABLE = 75  # exit code of a run that was stopped with a checkpoint and can be resumed

CurriculumConfig = Annotated[ShuffleConfig | DifficultyConfig, Field(discriminator="type")]


class TrainSourceConfig(ServedSourceConfig):
    """`[[train]]`: an environment to train on."""

    endpoint: EndpointConfig | None = None
    """Model server of its agents. Default: the run's inference."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the groups, relative to the weights of the other sources."""
    group_size: int | None = Field(default=None, ge=1)
    """Attempts per group. Default: `orchestrator.group_size`. The groups per step stay the same, so the rollouts per
    step change with it."""
    algorithm: dict[str, Any] = DEFAULT_ALGORITHM
    """grpo, dr_grpo, rloo, max_rl, echo, turn_credit, rae, opd, sft or a plugin, with its keys."""
    teacher: str | None = None
    """The model of `[models]` that is distilled: `opd` lets it score the policy's samples, `sft` lets it sample."""
    reference: str | None = None
    """The model of `[models]` that the policy stays close to with `beta`. Default: `start`, the model that the run
    starts from."""
    normalization: Literal["token", "sequence", "fixed"] = "token"
    """How the loss is averaged: over all tokens, over rollouts of the mean of their tokens (`sequence`), or over
    rollouts of the sum of their tokens divided by `normalization_tokens` (`fixed`)."""
    normalization_tokens: int | None = Field(default=None, ge=1)
    """The number of tokens that `fixed` divides by, usually the most tokens of a rollout."""
    curriculum: CurriculumConfig = ShuffleConfig()

    @field_validator("algorithm")
    @classmethod
    def _default_algorithm_to_grpo(cls, table: dict[str, Any]) -> dict[str, Any]:
        return {**DEFAULT_ALGORITHM, **table}

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield each setting that does not fit the others."""
        yield from super().find_problems()
        yield from self._find_model_problems()
        yield from self._find_normalization_problems()
        yield from self.sampling.find_training_problems()

    def _find_model_problems(self) -> Iterator[tuple[str, str]]:
        id, beta = self.algorithm["id"], self.algorithm.get("beta")
        if self.teacher is None and id in TEACHER_ALGORITHMS:
            misplaced = "; write `teacher` beside `algorithm`, not in it" if "teacher" in self.algorithm else ""
            yield "algorithm.id", f"{id!r} needs `teacher`, the name of a model in [models]{misplaced}"
        if id in PLUGIN_KINDS["algorithm"].builtin_paths:
            if self.teacher is not None and id not in TEACHER_ALGORITHMS:
                yield "teacher", f"the algorithm {id!r} has none; {' and '.join(TEACHER_ALGORITHMS)} do"
                return  # so the rules for a teacher do not apply
            if self.reference is not None and not beta:
                yield "reference", f"the algorithm {id!r} uses none without beta"
                return
        if self.score_model is not None and self.sampling.temperature != 1:
            problem = f"expected 1 with the algorithm {id!r}, whose other model scores at temperature 1"
            yield "sampling.temperature", f"{problem}, got {self.sampling.temperature:g}"
        if self.sampler_model is not None and self.endpoint is not None:
            yield "endpoint", "not allowed with the algorithm 'sft', whose teacher samples"

    def _find_normalization_problems(self) -> Iterator[tuple[str, str]]:
        if (self.normalization == "fixed") != (self.normalization_tokens is not None):
            yield "normalization_tokens", "required with normalization = 'fixed', and only then"

    @property
    def sampler_model(self) -> str | None:
        """The model of `[models]` that samples the rollouts; None if the policy does."""
        return self.teacher if self.algorithm["id"] == "sft" else None

    @property
    def top_k(self) -> int:
        """The number of likeliest tokens that the score model returns at each position."""
        return self.algorithm.get("top_k", 0) if self.algorithm["id"] == "opd" else 0

    @property
    def score_model(self) -> str | None:
        """The model that scores the rollouts; None if none does."""
        if self.algorithm["id"] == "sft":
            return None
        default = START_REFERENCE if self.algorithm.get("beta") else None
        return self.teacher or self.reference or default

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the source in the identity of a run. Default values that were added later are left out."""
        optional = {
            "algorithm": self.algorithm if self.algorithm != DEFAULT_ALGORITHM else None,
            "teacher": self.teacher,
            "reference": self.reference if self.reference != START_REFERENCE else None,
        }
        return {
            "taskset": self.taskset,
            "harness": self.harness,
            "sampling": self.sampling.model_dump(mode="json"),
            **{key: value for key, value in optional.items() if value},
        }


def uses_model(source: ServedSourceConfig, name: str) -> bool:
    """Return whether a source uses the model `name` of `[models]`: to score, to sample, or as a judge or a user."""
    if isinstance(source, TrainSourceConfig) and name in (source.score_model, source.sampler_model):
        return True
    return f'"{RUN_MODEL_PREFIX}{name}"' in json.dumps(source.model_dump(), default=str)


class OrchestratorConfig(Config):
    """How attempts are dispatched and batches are formed."""

    batch_size: int = Field(default=128, ge=1)
    """Rollouts per step, a multiple of `group_size`: a step has `batch_size / group_size` groups."""
    group_size: int = Field(default=16, ge=1)
    """Attempts per group."""
    min_group_size: int = Field(default=2, ge=1)
    """Minimum group size: a group with fewer attempts left is dropped."""
    max_staleness: int = Field(default=8, ge=0)
    """Maximum staleness of a group in steps. 0 alternates sampling and training (on-policy)."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Maximum attempts in flight. None: as implied by `max_staleness`. The actual limit adapts to engine load."""
    filters: list[dict[str, Any]] = [
        {"id": "gibberish"},
        {"id": "repetition"},
        {"id": "zero_advantage", "mode": "enforce"},
    ]
    """Filters of rollouts: gibberish, repetition, truncated, zero_advantage or plugins, with their keys."""
    max_untrainable_groups: int | None = Field(default=256, ge=1)
    """Groups in a row that cannot be trained on, after which `on_no_signal` applies. None: never. The run warns after
    32 of them."""
    on_no_signal: Literal["end", "warn"] = "end"
    """After `max_untrainable_groups`: `end` ends the run with `RunStalled`, `warn` reports it and continues."""
    stall_timeout: float = Field(default=1800.0, gt=0)
    """Seconds without progress after which the run fails with `RunStalled`."""
    address: TcpAddress = "tcp://127.0.0.1:0"
    """Address the trainer connects to. Port 0 picks a free port."""
    status_address: HttpAddress = "http://127.0.0.1:0"
    """Address of the status server. Port 0 picks a free port."""
    allowed_hosts: list[str] = []
    """Host names that requests to `/stop` may use, besides the host of `status_address`, IP addresses, names without a
    dot and this machine's name."""

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a batch size that is not a multiple of the group size."""
        if remainder := self.batch_size % self.group_size:
            smaller = self.batch_size - remainder
            multiples = " or ".join(str(size) for size in (smaller, smaller + self.group_size) if size)
            problem = f"{self.batch_size} is not a multiple of group_size {self.group_size}"
            yield "batch_size", f"{problem}; use {multiples}"

    @property
    def admission_limits(self) -> AdmissionLimits:
        """Groups per batch, slots and window."""
        return AdmissionLimits.from_max_staleness(self.batch_size // self.group_size, self.max_staleness)


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
    """TensorBoard event files in the run directory."""

    type: Literal["tensorboard"] = "tensorboard"


SinkConfig = Annotated[WandbConfig | TrackioConfig | TensorboardConfig, Field(discriminator="type")]


class RolloutSamplesConfig(Config):
    """Sample rollouts that are sent to the sinks as text."""

    interval: int = Field(default=20, ge=1)
    """Steps between samples."""
    per_source: int = Field(default=2, ge=0)
    """Rollouts per source. 0: none."""


class MonitorConfig(Config):
    """Where metrics go besides the run's database."""

    sinks: list[SinkConfig] = []
    """Tables with a `type` (wandb, tensorboard or trackio) and its keys: `{ type = "wandb", project = "x" }`."""
    samples: RolloutSamplesConfig = RolloutSamplesConfig()


class RunConfig(SharedSourceSettings):
    """`ramify rl`."""

    common_keys: ClassVar = (
        "model.name",
        "train.0.taskset",
        "harness",
        "sampling.max_tokens",
        "eval.0.taskset",
        "eval.0.interval",
        "orchestrator.batch_size",
        "orchestrator.group_size",
        "orchestrator.max_staleness",
        "max_steps",
        "seq_len",
        "trainer.optim.lr",
        "trainer.loss.id",
        "trainer.lora.rank",
        "trainer.pack_tokens",
        "inference.engine",
        "launch.gpu_placement",
        "checkpoint.interval",
        "monitor.sinks",
    )

    name: RunName = ""
    """Name of the run directory. Default: taskset, model and a hash of the run's identity."""
    output: Path = Path("outputs")
    """Directory for runs (-o)."""
    max_steps: int = Field(default=100, ge=1)
    """Steps to train."""
    seq_len: int = Field(default=2048, ge=2)
    """Maximum tokens of a path from the root of a trace to a leaf, for sampling and training."""
    seed: int = 0
    """Seed of the order of tasks and of sampling."""
    secret_env: str = "RAMIFY_SECRET"
    """Environment variable with the shared secret. Required if an address is reachable from other machines."""
    record_batches: bool = False
    """Write every batch that the trainer gets to `batches/` in the run directory, for `ramify trainer --replay`."""
    model: TrainedModelConfig = TrainedModelConfig()
    """The model (-m)."""
    models: dict[str, NamedModelConfig] = {}
    """Other models by name: teachers, references, judges. Their weights never change."""
    renderer: RendererConfig = TemplateRendererConfig()
    inference: InferenceConfig = EngineConfig()
    """The engine that the run starts, or the `base_url` of running servers (-b)."""
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    train: list[TrainSourceConfig] = Field(min_length=1)
    eval: list[EvalSourceConfig] = []
    launch: LaunchConfig = LaunchConfig()
    cluster: ClusterConfig = ClusterConfig()
    monitor: MonitorConfig = MonitorConfig()

    _source_names_must_be_unique = field_validator("train", "eval")(check_source_names)

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield each setting that does not fit the others."""
        yield from super().find_problems()
        yield from self._find_source_problems()
        yield from self._find_weights_url_problems()
        yield from self._find_model_name_problems()
        yield from self._find_cluster_problems()
        yield from find_quantize_problems(self.model, self.trainer)
        yield from self.checkpoint.find_metric_problem(source.source_name for source in self.eval)
        if self.weights.adapters != "auto" and not self.trainer.lora.enabled:
            yield "weights.adapters", "is for LoRA; set trainer.lora.rank, or remove the key"

    def _find_source_problems(self) -> Iterator[tuple[str, str]]:
        for kind, sources in (("train", self.train), ("eval", self.eval)):
            for number, source in enumerate(sources):
                if source.address is not None and source.pool != ElasticPoolConfig():
                    yield f"{kind}.{number}", "pool is not allowed with `address`: the run does not start that server"
                if source.seq_len is not None and source.seq_len > self.seq_len:
                    problem = f"{source.seq_len} is longer than the run's seq_len, {self.seq_len}"
                    yield f"{kind}.{number}.seq_len", problem

    def _find_weights_url_problems(self) -> Iterator[tuple[str, str]]:
        if self.weights.url is not None and isinstance(self.inference, VLLMConfig):
            yield "weights.url", "vLLM reads weights from a directory; use cluster.shared_directory"

    def _find_model_name_problems(self) -> Iterator[tuple[str, str]]:
        for name in self.models:
            if not MODEL_NAME.fullmatch(name):
                yield f"models.{name}", "expected letters, digits, - and _ in the name of a model"
        for number, source in enumerate(self.train):
            for key in ("teacher", "reference"):
                name = getattr(source, key)
                if name is None or name in self.models or (key == "reference" and name == START_REFERENCE):
                    continue
                hint = suggest(name, self.models, f"models: {', '.join(self.models) or 'none'}")
                yield f"train.{number}.{key}", f"there is no [models.{name}]; {hint}"

    def _find_cluster_problems(self) -> Iterator[tuple[str, str]]:
        cluster, launch = self.cluster, self.launch
        if launch.trainer_gpus is not None and cluster.trainer.num_ranks is not None:
            yield "launch.trainer_gpus", "not allowed with cluster.trainer.num_ranks; set one of them"
        if launch.inference_gpus is not None and cluster.engines.num_replicas is not None:
            yield "launch.inference_gpus", "not allowed with cluster.engines.num_replicas; set one of them"
        if launch.base_port and (cluster.env_servers.num_per_source or 1) > 1:
            yield "launch.base_port", "not allowed with several env servers per source"
        if isinstance(self.inference, ExternalServersConfig) and cluster.engines != EnginePlacementConfig():
            yield "cluster.engines", "not allowed with inference.base_url: the run does not start these servers"
        if not cluster.is_distributed:
            return
        for key, instead in LOCAL_LAUNCH_KEYS.items():
            if getattr(self.launch, key) != LaunchConfig.model_fields[key].default:
                yield f"launch.{key}", f"not allowed on a cluster; {instead}"
        if self.weights.transport not in ("auto", "disk"):
            reason = "reaches only engines on the trainer's node"
            yield "weights.transport", f"{self.weights.transport!r} {reason}; use 'disk' on a cluster"
        if self.record_batches:
            yield "record_batches", "not supported on a cluster: the trainer's nodes lack the run directory"

    @property
    def all_models(self) -> dict[str, NamedModelConfig]:
        """The other models of the run, and the model it starts from if that is a reference with an engine.

        With LoRA it needs no engine: the trainer has it, with its adapters off.
        """
        needs_start = any(source.score_model == START_REFERENCE for source in self.train)
        if START_REFERENCE in self.models or not needs_start or self.trainer.lora.enabled:
            return self.models
        engine = self.inference if isinstance(self.inference, EngineConfig | VLLMConfig) else EngineConfig()
        return {**self.models, START_REFERENCE: NamedModelConfig(name=self.model.name, inference=engine)}

    @property
    def plugin_tables(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Kind, key and table of every algorithm, then of every filter."""
        algorithms = [("algorithm", f"train.{i}.algorithm", source.algorithm) for i, source in enumerate(self.train)]
        filters = enumerate(self.orchestrator.filters)
        return [*algorithms, *(("filter", f"orchestrator.filters.{i}", table) for i, table in filters)]

    def get_group_size(self, source: TrainSourceConfig) -> int:
        """Return the attempts per group of a source."""
        return source.group_size or self.orchestrator.group_size

    def with_default_seq_len(self, source: ServedSourceConfig) -> ServedSourceConfig:
        """Return the source with the run's `seq_len` if it has none."""
        return source if source.seq_len is not None else source.model_copy(update={"seq_len": self.seq_len})

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that identify a run. A run is not resumed with a different identity."""
        is_lora = self.trainer.lora.enabled
        lora = dump_lora_identity(self.model, self.trainer) if is_lora else {"lora": {"enabled": False}}
        return {**self._named_identity, **lora}

    @property
    def _named_identity(self) -> dict[str, Any]:
        """The part of the identity that the default name depends on: all but the LoRA settings."""
        sources = {source.source_name: source.identity for source in self.train}
        models = {
            name: {"name": model.name}
            for name, model in self.models.items()
            if model.name and any(uses_model(source, name) for source in self.train)
        }
        if models.get(START_REFERENCE) == {"name": self.model.name}:
            del models[START_REFERENCE]  # the orchestrator's configuration names it, the run's need not
        tables = {"model": self.model.name, "train": sources, **({"models": models} if models else {})}
        return json.loads(json.dumps(tables, default=str))

    @property
    def secret(self) -> str | None:
        """The shared secret of the run's processes; None without one."""
        return os.environ.get(self.secret_env) or None

    @property
    def path(self) -> Path:
        """The run directory."""
        names = "+".join(source.source_name for source in self.train)
        return self.output / (self.name or default_run_name(names, self.model.name, self._named_identity))

    @property
    def shared_path(self) -> Path | None:
        """The run's directory on storage that all nodes reach; None if the run has none."""
        directory = self.cluster.shared_directory
        return None if directory is None else directory.absolute() / self.path.name

    @property
    def weights_directory(self) -> Path:
        """The directory of the published weights."""
        return self.weights.directory_for(self.path, self.shared_path)
