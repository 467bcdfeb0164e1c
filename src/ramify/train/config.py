"""Configuration of training. Importable without torch."""

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ramify.core.config import Config, RunName, TcpAddress
from ramify.core.errors import ConfigInvalid
from ramify.infer.config import ModelConfig
from ramify.train.weights_directory import get_weights_directory

DEFAULT_PACK_TOKENS = 16384
Beta = Annotated[float, Field(ge=0, lt=1)]


class ScheduleConfig(Config):
    """The learning rate over the steps, as a fraction of `optim.lr`."""

    type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the decay; `wsd` is constant until the last steps (warmup, stable, decay)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Steps of the decay. None: all steps after the warmup; for `wsd` the last 20 % of all steps."""
    min_lr_factor: float = Field(default=0.0, ge=0, le=1)
    """The learning rate after the decay, as a fraction of `optim.lr`."""

    @model_validator(mode="after")
    def _decay_keys_require_decaying_schedule(self) -> "ScheduleConfig":
        if self.type == "constant" and (self.decay_steps is not None or self.min_lr_factor):
            raise ValueError("decay_steps and min_lr_factor need a schedule that decays: linear, cosine or wsd")
        return self


class OptimConfig(Config):
    """The optimizer."""

    type: Literal["adamw", "muon"] = "adamw"
    """`muon` uses Muon for the matrices inside the layers, and AdamW for everything else."""
    lr: float = Field(default=1e-5, gt=0)
    """The learning rate; the schedule scales it."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's term for numerical stability."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices; norms and biases have none."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's momentum."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm; None disables clipping."""
    moments: Literal["auto", "float32", "8bit"] = "auto"
    """The format of AdamW's moments inside the layers: 8 bytes or 2 for each weight. `auto` is float32 if the run fits
    on its GPU with it, else `8bit`; a run never changes its format."""
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _8bit_moments_require_adamw(self) -> "OptimConfig":
        if self.moments == "8bit" and self.type != "adamw":
            raise ValueError("moments = '8bit' needs type = 'adamw'")
        return self

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ConfigInvalid if several ranks would have moments in 8 bits: their shards would not be whole blocks."""
        if self.moments == "8bit" and num_ranks > 1:
            advice = "use one rank or, in a run without checkpoints in 8 bits, 'float32'"
            problem = f"'8bit' needs a trainer of one rank, got {num_ranks}; {advice}"
            raise ConfigInvalid(problem, key="trainer.optim.moments")


class LossConfig(Config):
    """The policy-gradient loss."""

    id: str = "dppo"
    """dppo, ppo, cispo, gspo, icepop, tis, or a function: `package.module.function` or `file.py:function`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the loss, such as `{ high = 0.28 }`."""

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with the id or the options of a built-in loss; the trainer checks an import path."""
        from ramify.train.losses import load_loss

        if "." not in self.id and ":" not in self.id:
            try:
                load_loss(self.id, self.options)
            except ConfigInvalid as error:
                yield "", error.message


class TrainedModelConfig(ModelConfig):
    """The model to train."""

    quantize: Literal["8bit", "4bit"] | None = None
    """With LoRA: store the fixed matrices of the layers in 8 or 4 bits, with one scale for 64 weights. A matrix is
    dequantized just before each product. None: not quantized."""


class LoraConfig(Config):
    """Train adapters beside the matrices of the layers, which stay fixed."""

    switch: ClassVar = "enabled"

    enabled: bool = True
    """Without this section all weights are trained. If any key of the section is set, `false` turns it off again."""
    rank: int = Field(default=16, ge=1)
    """The rank of each adapter. Setting it, or any key of the section, trains adapters instead of all weights."""
    alpha: int = Field(default=32, ge=1)
    """The adapters' product is scaled by alpha / rank."""
    target_modules: list[str] = []
    """The linear maps that get an adapter, by the last part of their names; empty: all inside the layers."""


class CheckpointConfig(Config):
    """When checkpoints are saved, and how many are kept."""

    interval: int = Field(default=50, ge=1)
    """Steps between two checkpoints."""
    keep_last: int = Field(default=2, ge=1)
    """The number of checkpoints to keep; older ones are removed."""
    keep_interval: int | None = Field(default=None, ge=1)
    """Also keep the checkpoints of every step that is a multiple of this, which is a multiple of `interval`."""
    keep_best: str | None = None
    """Also keep the checkpoint with the highest value of this metric, such as `eval/NAME/avg`, or with the lowest one
    if its name ends in `loss`. Steps at which it was not measured do not count."""

    @model_validator(mode="after")
    def _keep_interval_is_a_multiple_of_interval(self) -> "CheckpointConfig":
        if self.keep_interval is not None and self.keep_interval % self.interval:
            raise ValueError(
                f"keep_interval must be a multiple of interval = {self.interval}, got {self.keep_interval}"
            )
        return self

    def find_metric_problem(self, evals: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield a problem if `keep_best` is a metric of an eval that the run, whose evals are given, does not have."""
        kind, _, rest = (self.keep_best or "").partition("/")
        if kind == "eval" and not any(rest.startswith(f"{name}/") for name in evals):
            yield "checkpoint.keep_best", f"there is no [[eval]] for {self.keep_best!r}; use eval/NAME/avg of one"

    def choose_kept_steps(self, saved_steps: Sequence[int], values: Mapping[int, float]) -> set[int]:
        """Return the saved steps to keep. `values` are the values of the metric `keep_best`, by step."""
        kept = set(sorted(saved_steps)[-self.keep_last :])
        if self.keep_interval is not None:
            kept.update(step for step in saved_steps if step % self.keep_interval == 0)
        best = None if self.keep_best is None else find_best_step(self.keep_best, values, saved_steps)
        return kept if best is None else kept | {best}

    def count_kept(self, num_saves: int) -> int:
        """Return the most checkpoints that a run keeps which saves `num_saves` of them."""
        permanent = 0 if self.keep_interval is None else num_saves * self.interval // self.keep_interval
        return min(num_saves, self.keep_last + permanent + (self.keep_best is not None))


def find_best_step(metric: str, values: Mapping[int, float], steps: Iterable[int]) -> int | None:
    """Return the step of `steps` with the highest value of a metric, or with the lowest one if its name ends in `loss`.

    Of equal values, the last step counts. None if the metric was measured at none of them.
    """
    sign = -1.0 if metric.endswith("loss") else 1.0
    ranked = [(sign * values[step], step) for step in steps if math.isfinite(values.get(step, math.nan))]
    return max(ranked)[1] if ranked else None


class TrainerConfig(Config):
    """How the trainer computes a step."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation; master weights are always float32. `auto`: bfloat16 on a GPU, float32 on a CPU."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; None is torch's default."""
    pack_tokens: Literal["auto"] | Annotated[int, Field(ge=128, multiple_of=128)] = "auto"
    """Tokens per forward and backward pass; larger trees are split. `auto`: what the GPU's memory allows, up to 49,152
    (16,384 if an RL run has several GPUs) or twice `seq_len`; 16,384 on a CPU."""
    compile: bool | None = None
    """Compile the layers; None compiles on a GPU."""
    recompute_layers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """The number of layers whose activations the backward pass recomputes: up to a third more work, a fraction of the
    memory. `auto`: as few as the GPU's memory allows; 0 on a CPU."""
    freeze_vision: bool = False
    """Keep the vision tower of a vision-language model and its projection fixed: engines encode an image only once."""
    record_token_stats: bool = False
    """Store the logprob and the entropy of every trained token, in `token_stats/` of the run directory."""
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    lora: LoraConfig = LoraConfig(enabled=False)

    @property
    def max_pack_tokens(self) -> int:
        """`pack_tokens`, or its default where no plan has chosen it."""
        return DEFAULT_PACK_TOKENS if self.pack_tokens == "auto" else self.pack_tokens

    @property
    def num_recomputed_layers(self) -> int:
        """`recompute_layers`, or 0 where no plan has chosen it."""
        return 0 if self.recompute_layers == "auto" else self.recompute_layers

    def with_moments(self, moments: str) -> "TrainerConfig":
        """Return these settings with another format of AdamW's moments."""
        return self.model_copy(update={"optim": self.optim.model_copy(update={"moments": moments})})


def find_quantize_problems(model: TrainedModelConfig, trainer: TrainerConfig) -> Iterator[tuple[str, str]]:
    """Yield a problem if the model is quantized and all its weights are trained."""
    if model.quantize is not None and not trainer.lora.enabled:
        problem = f"weights in {model.quantize.removesuffix('bit')} bits cannot be trained"
        yield "model.quantize", f"{problem}; train adapters ([trainer.lora]), or remove the key"


def dump_lora_identity(model: TrainedModelConfig, trainer: TrainerConfig) -> dict[str, Any]:
    """Return the LoRA settings that identify a run, and the format of the fixed weights if they are quantized."""
    quantize = {} if model.quantize is None else {"model.quantize": model.quantize}
    return {"lora": trainer.lora.model_dump(mode="json"), **quantize}


class WeightsConfig(Config):
    """How engines get new weights from the trainer."""

    transport: Literal["auto", "disk", "shm", "ipc", "ipc+disk", "ipc+shm"] = "auto"
    """`disk`: directories below the run or its shared directory, for engines that reach this file system. `shm`:
    directories in memory, for engines on the same host. `ipc`: engines on the trainer's GPU copy its tensors, and a
    directory follows for some versions, or for all if other engines read it (`ipc+disk`, `ipc+shm`). `auto`: `ipc` on
    the trainer's GPU, `shm` on its host if the memory has room, else `disk`."""

    adapters: Literal["auto", "merged", "unmerged"] = "auto"
    """With LoRA: `unmerged` publishes only the adapters, which native engines apply beside the base model, as the
    trainer does. `merged` publishes complete models, in whose bfloat16 small changes may be rounded away. `auto` is
    `unmerged` for native engines that the run starts, else `merged`."""
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
    model: TrainedModelConfig = TrainedModelConfig()
    """The model to start from (-m)."""
    seed: int = 0
    """Seed of the adapters' initial weights."""
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a quantized model whose weights are all trained."""
        yield from find_quantize_problems(self.model, self.trainer)

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


def read_run_config(path: Path) -> tuple[TrainedModelConfig, TrainerConfig]:
    """Read the model and the settings of the trainer from a run's configuration."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
        model = TrainedModelConfig.model_validate(table["model"])
        return model, TrainerConfig.model_validate(table.get("trainer", {}))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigInvalid(f"{path} does not say how the run was trained: {error}") from error
