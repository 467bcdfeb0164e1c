"""Configuration of `ramify sft`. Importable without torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from ramify.core.config import Config, RunName
from ramify.env.data_config import DataColumnsConfig, DataFilesConfig
from ramify.infer.config import EngineConfig, ManagedInferenceConfig
from ramify.model.render.config import RendererConfig, TemplateRendererConfig
from ramify.rollout.config import SharedSourceSettings, check_source_names
from ramify.rollout.evals.config import EvalSourceConfig
from ramify.train.config import (
    CheckpointConfig,
    LossConfig,
    TrainedModelConfig,
    TrainerConfig,
    dump_lora_identity,
    find_quantize_problems,
)


class SftDataConfig(DataColumnsConfig):
    """The conversations to train on. `[data]` is one dataset; several are entries `[[data]]`."""

    misplaced_keys: ClassVar = {"split": "part", "answer_column": "completion_column"}

    weight: float | None = Field(default=None, gt=0)
    """Share of the examples, relative to the weights of the other datasets. Default: as many as it has, if none of the
    datasets has a weight."""
    messages_column: str = "messages"
    """The column of the conversation. A row without it has a prompt and a completion."""
    tools_column: str = "tools"
    """The column of the tools that were offered; optional."""
    completion_column: str = "completion"
    """The column of the reply: text, or messages."""
    train_on_roles: list[str] = Field(default=["assistant"], min_length=1)
    """The roles whose messages are trained."""


class SftValidationConfig(Config):
    """Conversations that are not trained on, only scored. Set `path`, or hold out a `fraction` of the data."""

    switch: ClassVar = "fraction"

    path: str | None = None
    """Conversations to validate on, in the same format as `data.path`."""
    revision: str | None = None
    """Branch, tag or commit of `path` on the hub."""
    subset: str | None = None
    """The subset of `path`, if it has several."""
    part: str | None = None
    """The part of `path` to read."""
    fraction: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the training data to hold out instead of `path`."""
    interval: int = Field(default=50, ge=1)
    """Steps between two validations; there is also one before the first step and one after the last."""

    @model_validator(mode="after")
    def _path_or_fraction(self) -> "SftValidationConfig":
        if self.path is not None and self.fraction:
            raise ValueError("set either path or fraction, not both")
        selection = (self.revision, self.subset, self.part)
        if self.path is None and (any(selection) or "fraction" not in self.model_fields_set):
            raise ValueError("part and interval need conversations to validate on: set path or fraction")
        return self

    @property
    def enabled(self) -> bool:
        """Whether there is anything to validate on."""
        return self.path is not None or self.fraction > 0


class SftConfig(SharedSourceSettings):
    """`ramify sft`: a model, conversations, and how it is trained on them."""

    source_kinds: ClassVar = ("eval",)
    common_keys: ClassVar = (
        "model.name",
        "data.path",
        "validation.fraction",
        "batch_size",
        "epochs",
        "seq_len",
        "trainer.optim.lr",
        "trainer.lora.rank",
        "checkpoint.interval",
    )

    name: RunName = ""
    """The run's directory below `output`; by default data, model and a hash of the run's identity."""
    output: Path = Path("outputs")
    """The directory of all runs (-o)."""
    model: TrainedModelConfig = TrainedModelConfig()
    """The model to start from (-m)."""
    renderer: RendererConfig = TemplateRendererConfig()
    data: Annotated[
        Annotated[SftDataConfig, Tag("one")] | Annotated[list[SftDataConfig], Tag("several")],
        Discriminator(lambda value: "several" if isinstance(value, list) else "one"),
    ]
    validation: SftValidationConfig = SftValidationConfig(fraction=0.0)
    seq_len: int = Field(default=2048, ge=2)
    """Longer conversations are truncated; the tokens lost are counted."""
    batch_size: int = Field(default=32, ge=1)
    """Examples per step."""
    epochs: int = Field(default=1, ge=1)
    """Number of passes over the data."""
    max_steps: int | None = Field(default=None, ge=1)
    """Maximum number of steps; None: all epochs."""
    seed: int = 0
    """Seed of the order of examples and of the adapters' initial weights."""
    eval: list[EvalSourceConfig] = []
    """Environments to evaluate the model on, as in `ramify rl`."""
    inference: ManagedInferenceConfig = EngineConfig()
    """The engine that serves the model during an eval."""
    startup_timeout: float = Field(default=600.0, gt=0)
    """Seconds until the processes of an eval must be ready."""
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    _source_names_must_be_unique = field_validator("eval")(check_source_names)

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield settings that only reinforcement learning has, and a quantized model whose weights are all trained."""
        for number, source in enumerate(self.eval):
            if source.endpoint is not None or source.address is not None:
                key = "endpoint" if source.endpoint is not None else "address"
                yield f"eval.{number}.{key}", "is not for ramify sft, which evaluates its own weights; remove it"
        if self.trainer.loss != LossConfig():
            yield "trainer.loss", "is the loss of reinforcement learning; ramify sft uses cross entropy"
        if self.trainer.record_token_stats:
            yield "trainer.record_token_stats", "is for rollouts; ramify sft has none"
        yield from find_quantize_problems(self.model, self.trainer)
        yield from self.checkpoint.find_metric_problem(source.source_name for source in self.eval)
        if not self.datasets:
            yield "data", "names no dataset"
        if len({dataset.weight is None for dataset in self.datasets}) > 1:
            yield "data", "some datasets have a `weight` and others have none; set it for all, or for none"

    @property
    def datasets(self) -> list[SftDataConfig]:
        """The datasets to train on."""
        return self.data if isinstance(self.data, list) else [self.data]

    @property
    def validation_data(self) -> SftDataConfig | None:
        """The dataset to validate on, with the columns of the first one to train on; None if there is none."""
        if self.validation.path is None:
            return None
        selection = self.validation.model_dump(include=set(DataFilesConfig.model_fields))
        return self.datasets[0].model_copy(update=selection)

    @property
    def trained_roles(self) -> list[str]:
        """The roles that are trained in any dataset."""
        return sorted({role for dataset in self.datasets for role in dataset.train_on_roles})

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that identify the run; all others may change when it is resumed."""
        return {
            **self.model_dump(mode="json", include={"renderer", "seq_len", "seed"}),
            **self.model_dump(mode="json", include={"data"}, exclude_none=True),
            "model": self.model.name,
            **dump_lora_identity(self.model, self.trainer),
            "held_out": self.validation.fraction,
        }
