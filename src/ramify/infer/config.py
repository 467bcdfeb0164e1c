"""The config of the engine and its server. Importable without torch."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from ramify.core.config import Config
from ramify.model.render.config import RendererConfig, TemplateRendererConfig
from ramify.model.run_models import check_model_name, expand_run_model

# On a CPU, on a GPU:
DEFAULT_RUNNING_REQUESTS, DEFAULT_BATCHED_TOKENS, DEFAULT_KV_FRACTIONS = (64, 256), (1024, 8192), (0.4, 0.85)
DEFAULT_VLLM_FRACTION = 0.4  # of a GPU's memory
ModelName = Annotated[str, AfterValidator(check_model_name)]
AutoCount = Literal["auto"] | Annotated[int, Field(ge=1)]


class ModelConfig(Config):
    """A model by name."""

    name: ModelName = "tiny"
    """A packaged model, a directory, a Hugging Face id, or the model of another run. An id is downloaded if it is not
    in the local cache. The model of a run is `run:NAME`, `run:NAME@STEP` or `run:NAME@best:METRIC`."""


class EngineAdaptersConfig(Config):
    """Adapters that the engine adds to its model, for versions of the weights that hold only adapters."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    target_modules: list[str] = []
    quantize: Literal["8bit", "4bit"] | None = None
    """Hold the matrices beside adapters in 8 or 4 bits, as the trainer does. On a CPU they are rounded to the same
    numbers and keep their dtype."""


class EngineConfig(Config):
    """The native engine. A run on GPUs chooses what is `auto` when it is planned."""

    engine: Literal["native"] = "native"
    """The inference engine: `native` or `vllm`; a run may also use running servers (`external`)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation. `auto` is the checkpoint's, or float32 on a CPU without bfloat16."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for matrix products and attention; None leaves the choice to torch."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and reply together; None is what the model allows and the cache can hold."""
    max_running_requests: AutoCount = "auto"
    """Maximum number of requests that run at the same time; the others wait. `auto`: 64 on a CPU, 256 on a GPU, in a
    run as many as it has."""
    max_num_batched_tokens: AutoCount = "auto"
    """Maximum tokens of one step, decoding and prefill together. `auto`: 1,024 on a CPU, 8,192 on a GPU."""
    max_queued_requests: int = Field(default=1024, ge=1)
    """Maximum number of waiting requests; further requests are rejected."""
    block_size: int = Field(default=16, ge=1)
    """Tokens per block of the KV cache, the unit of prefix caching."""
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the KV cache holds. None: as many as `max_running_requests` requests of full length need, limited by
    `kv_memory_fraction`; a run on GPUs chooses a number that fits."""
    kv_memory_fraction: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] = "auto"
    """Fraction of the device's free memory that the KV cache may take. `auto`: 0.4 on a CPU, 0.85 on a GPU; a run on
    GPUs chooses `kv_cache_tokens` instead."""
    image_cache_mib: int = Field(default=1024, ge=1)
    """MiB of uploaded images that are kept, and of their features, for a vision-language model."""
    prefix_cache: bool = True
    """Reuse the keys and values of prompts that begin alike."""
    share_prefixes: bool = True
    """On a GPU, read the keys and values that several requests have in common once per step for all of them."""
    state_snapshots: int | None = Field(default=None, ge=0)
    """Snapshots of recurrent states that the prefix cache keeps, for models with such layers (linear attention). None:
    two per running request."""
    batch_invariant: bool = False
    """Use fixed shapes: a request then gets the same bits whatever else is in the batch. Slower."""
    fused_ops: bool = True
    """Run the families that docs/models.md lists as `fused` with fused operators, after checking these against the
    model's own code. On a CPU some of them are compiled at the start if there is a C compiler."""
    weights_url: str | None = None
    """Object store to fetch published weights from if their directory is not on this node. A run sets it."""
    copy_from_trainer: bool = True
    """Copy new weights from the trainer's GPU memory. A run turns it off for engines on other GPUs."""
    adapters: EngineAdaptersConfig | None = None
    """Adapters beside the matrices of the model. A run sets it if `weights.adapters` are not merged."""

    def get_limits(self, *, gpu: bool) -> "EngineLimits":
        """Return the limits of an engine on a GPU or a CPU, with values where no plan has chosen them."""
        running, batched = self.max_running_requests, self.max_num_batched_tokens
        if running == "auto":
            running = min(DEFAULT_RUNNING_REQUESTS[gpu], batched if batched != "auto" else DEFAULT_BATCHED_TOKENS[gpu])
        if batched == "auto":
            batched = max(DEFAULT_BATCHED_TOKENS[gpu], running)
        fraction = DEFAULT_KV_FRACTIONS[gpu] if self.kv_memory_fraction == "auto" else self.kv_memory_fraction
        num_snapshots = 2 * running if self.state_snapshots is None else self.state_snapshots
        return EngineLimits(running, batched, fraction, num_snapshots if self.prefix_cache else 0)

    @model_validator(mode="after")
    def _batch_tokens_cover_running_requests(self) -> "EngineConfig":
        running, batched = self.max_running_requests, self.max_num_batched_tokens
        if running != "auto" and batched != "auto" and batched < running:
            problem = "max_num_batched_tokens must be at least max_running_requests"
            raise ValueError(f"{problem}, so that every request advances ({batched} < {running})")
        return self


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of a native engine, none of them `auto`."""

    max_running_requests: int
    max_num_batched_tokens: int
    kv_memory_fraction: float
    num_state_snapshots: int  # of recurrent states, that the prefix cache keeps


class VLLMConfig(Config):
    """A stock vLLM server, started from its own Python environment."""

    engine: Literal["vllm"] = "vllm"
    python: str = "python"
    """The Python interpreter of the environment with vLLM."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and reply together; None leaves the choice to vLLM."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Maximum number of requests that run at the same time. None: a run on GPUs chooses it, else vLLM."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of each engine, over which its weights are split."""
    gpu_memory_utilization: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] = "auto"
    """Fraction of a GPU's memory that vLLM may use, weights and KV cache together. `auto`: what a run on GPUs plans,
    else 0.4."""
    cpu_kv_cache_gib: int = Field(default=1, ge=1)
    """Size of the KV cache in GiB if vLLM runs on a CPU."""
    prefix_cache: bool = True
    enforce_eager: bool = False
    """Do not compile: faster start, slower decoding."""
    extra_args: list[str] = []
    """Additional arguments of `vllm serve`."""
    extra_env: dict[str, str] = {}
    """Additional environment variables."""
    log_file: str = "vllm.log"
    """File for the output of vLLM."""
    startup_timeout: float = Field(default=600.0, gt=0)
    """Seconds until vLLM must be ready."""

    @property
    def memory_fraction(self) -> float:
        """`gpu_memory_utilization`, or its default where no plan has chosen it."""
        return DEFAULT_VLLM_FRACTION if self.gpu_memory_utilization == "auto" else self.gpu_memory_utilization


class ExternalServersConfig(Config):
    """Running servers, native or vLLM. Ramify uses them and updates their weights, but never stops them."""

    engine: Literal["external"] = "external"
    base_url: list[str] = Field(min_length=1)
    """Addresses of the servers, such as `http://10.0.0.1:8000`; all serve the same model."""

    @field_validator("base_url")
    @classmethod
    def _urls_are_distinct_roots(cls, urls: list[str]) -> list[str]:
        roots = [url.rstrip("/") for url in urls]
        for root in roots:
            if not root.startswith(("http://", "https://")) or root.endswith("/v1"):
                raise ValueError(f"expected the root of a server, such as http://10.0.0.1:8000, got {root!r}")
            if roots.count(root) > 1:
                raise ValueError(f"{root} is listed twice")
        return roots


ManagedInferenceConfig = Annotated[EngineConfig | VLLMConfig, Field(discriminator="engine")]
InferenceConfig = Annotated[EngineConfig | VLLMConfig | ExternalServersConfig, Field(discriminator="engine")]


class NamedModelConfig(Config):
    """`[models.NAME]`: another model of a run, such as a teacher. Its weights never change.

    With `name` alone, the run starts and supervises an engine for it; with `base_url`, servers run already.
    """

    name: ModelName = ""
    """A model as in `model.name`. With `base_url`: the name of the model on the servers."""
    base_url: list[str] = []
    """Addresses of servers that run already, native or vLLM; all serve the same model."""
    inference: ManagedInferenceConfig = EngineConfig()
    """The engine that the run starts, with its share of a GPU's memory. Not allowed with `base_url`."""

    @field_validator("base_url")
    @classmethod
    def _urls_are_distinct_roots(cls, urls: list[str]) -> list[str]:
        return ExternalServersConfig(base_url=urls).base_url if urls else urls

    @model_validator(mode="after")
    def _model_has_one_origin(self) -> "NamedModelConfig":
        if not self.name and not self.base_url:
            raise ValueError("set name, the model to start an engine for, or base_url, servers that run already")
        if self.base_url and self.inference != EngineConfig():
            raise ValueError("inference is not allowed with base_url: the run does not start these servers")
        return self

    @property
    def is_managed(self) -> bool:
        """Whether the run starts an engine for it."""
        return not self.base_url


C = TypeVar("C", bound=Config)
M = TypeVar("M", ModelConfig, NamedModelConfig)


def expand_run_models(config: C) -> C:
    """Return the config with the directories of models that are named by a run; they may have to be exported.

    Raises ModelNotFound if there is no such run or step.
    """
    update: dict[str, Any] = {}
    model, models = getattr(config, "model", None), getattr(config, "models", {})
    if isinstance(model, ModelConfig) and (expanded := _expand_name(model)) != model:
        update["model"] = expanded
    if (all_expanded := {key: _expand_name(named) for key, named in models.items()}) != models:
        update["models"] = all_expanded
    return config.model_copy(update=update) if update else config


def _expand_name(model: M) -> M:
    """Return the config of a model; unchanged, so that defaults stay defaults, if it does not name a run."""
    name = expand_run_model(model.name)
    return model if name == model.name else model.model_copy(update={"name": name})


class ServerConfig(Config):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` accepts other machines too."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0 picks a free one; the address is printed."""
    model_name: str | None = None
    """The name of the model for clients; `model.name` by default."""
    allowed_hosts: list[str] = []
    """Additional host names that are accepted in the `Host` header of requests to `/pause`, `/resume` and
    `/update_weights`. `host`, addresses, names without a dot and this machine's name are always accepted."""
    timeout: float = Field(default=3600.0, gt=0)
    """Maximum seconds for a request, including the time in the queue."""
    shutdown_timeout: float = Field(default=10.0, gt=0)
    """Seconds that running requests get to finish when the server stops."""


class ServeConfig(Config):
    """`ramify serve`."""

    common_keys: ClassVar = (
        "model.name",
        "inference.engine",
        "inference.device",
        "inference.dtype",
        "inference.max_model_len",
        "server.host",
        "server.port",
        "server.model_name",
    )

    model: ModelConfig = ModelConfig()
    """The model to serve (-m)."""
    renderer: RendererConfig = TemplateRendererConfig()
    inference: ManagedInferenceConfig = EngineConfig()
    """The engine that serves it: native or vLLM."""
    server: ServerConfig = ServerConfig()

    @model_validator(mode="before")
    @classmethod
    def _inference_is_not_external(cls, data: Any) -> Any:
        """The config of a run may name servers that run already; such a run needs no `ramify serve`."""
        inference = data.get("inference") if isinstance(data, dict) else None
        if isinstance(inference, dict) and (inference.get("engine") == "external" or "base_url" in inference):
            problem = "inference.base_url names servers that run already: there is nothing to serve"
            raise ValueError(f"{problem}; leave it out, with inference.engine = 'native' or 'vllm'")
        return data

    @model_validator(mode="after")
    def _vllm_rejects_native_options(self) -> "ServeConfig":
        """Options of the native engine cannot be set for vLLM; a key without effect is an error."""
        native_options = [
            ("server.timeout", self.server.timeout != ServerConfig().timeout, "vLLM's clients bring deadlines"),
            ("server.allowed_hosts", bool(self.server.allowed_hosts), "vLLM checks no host names"),
            ("renderer", self.renderer != TemplateRendererConfig(), "vLLM renders chats by itself"),
        ]
        for key, is_set, reason in native_options:
            if is_set and self.inference.engine == "vllm":
                raise ValueError(f"{key} needs inference.engine = 'native'; {reason}")
        return self
