"""How the engine and its server are set up. Importable without torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ramify.config import Config
from ramify.render.config import RendererConfig, TemplateRendererConfig


class ModelConfig(Config):
    """The model to serve."""

    name: str = "tiny"
    """A packaged model, a directory, or a Hugging Face id, which is downloaded if it is not in the local cache."""


class EngineConfig(Config):
    """The native engine. The defaults fit a laptop; a GPU takes a larger `max_batch_tokens`."""

    engine: Literal["native"] = "native"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the matrix products; None leaves torch's own choice."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and reply together; None is what the model allows and the cache can hold."""
    max_running: int = Field(default=64, ge=1)
    """Requests that decode together; the others wait."""
    max_batch_tokens: int = Field(default=1024, ge=1)
    """Tokens of one step, decoding and prefill together."""
    queue: int = Field(default=1024, ge=1)
    """Requests that may wait; one more is refused."""
    block_size: int = Field(default=16, ge=1)
    """Tokens in a block of the cache, the unit of prefix sharing."""
    kv_tokens: int | None = Field(default=None, ge=1)
    """Tokens the cache holds; None takes what `max_running` full requests need, within `memory`."""
    memory: float = Field(default=0.4, gt=0, lt=1)
    """Share of the device's free memory that the cache may take."""
    prefix_cache: bool = True
    batch_invariant: bool = False
    """Fixed shapes: the same request gives the same bits whatever runs beside it. Slower."""
    fused: bool = True
    """Run models of the Llama family with fused operators, after checking them against the model's own code. On a CPU
    some of them are compiled at the start, where there is a C compiler."""

    @model_validator(mode="after")
    def _batch_tokens_cover_max_running(self) -> "EngineConfig":
        if self.max_batch_tokens < self.max_running:
            found = f"{self.max_batch_tokens} < {self.max_running}"
            raise ValueError(f"max_batch_tokens must be at least max_running, so that every request advances ({found})")
        return self


class VLLMConfig(Config):
    """A stock vLLM server, started from an environment of its own."""

    engine: Literal["vllm"] = "vllm"
    python: str = "python"
    """The interpreter of the environment that has vLLM."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and reply together; None is vLLM's own choice."""
    max_running: int | None = Field(default=None, ge=1)
    """Requests that decode together; None is vLLM's own choice."""
    memory: float = Field(default=0.4, gt=0, lt=1)
    """Share of a GPU's memory that vLLM takes in all."""
    cpu_cache: int = Field(default=1, ge=1)
    """GiB of keys and values, where vLLM runs on a CPU."""
    prefix_cache: bool = True
    eager: bool = False
    """Do not compile: up sooner, slower afterwards."""
    args: list[str] = []
    """More arguments of `vllm serve`, as they are."""
    env: dict[str, str] = {}
    """More variables of its environment."""
    log: str = "vllm.log"
    """The file its output goes to."""
    start_deadline: float = Field(default=600.0, gt=0)
    """Seconds until it has to answer."""


class ExternalConfig(Config):
    """Servers that run already, of either engine: they are sampled from and given weights, never started or stopped."""

    engine: Literal["external"] = "external"
    base_url: list[str] = Field(min_length=1)
    """Their addresses, such as `http://10.0.0.1:8000`, all serving the same model."""

    @field_validator("base_url")
    @classmethod
    def _urls_are_distinct_roots(cls, urls: list[str]) -> list[str]:
        roots = [url.rstrip("/") for url in urls]
        for root in roots:
            if not root.startswith(("http://", "https://")) or root.endswith("/v1"):
                raise ValueError(f"expected the root of a server, such as http://10.0.0.1:8000, got {root!r}")
            if roots.count(root) > 1:
                raise ValueError(f"{root} is named twice; a server is one replica")
        return roots


ManagedInferenceConfig = Annotated[EngineConfig | VLLMConfig, Field(discriminator="engine")]
InferenceConfig = Annotated[EngineConfig | VLLMConfig | ExternalConfig, Field(discriminator="engine")]


class ServerConfig(Config):
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 lets the system choose; the address is printed."""
    model_name: str | None = None
    """What clients call the model; by default as `model.name` does."""
    allowed_hosts: list[str] = []
    """Further names that the `Host` header of a request to `/pause`, `/resume` or `/update_weights` may hold; `host`,
    addresses, names without a dot and this machine's own name are always accepted."""
    timeout: float = Field(default=3600.0, gt=0)
    """Seconds a request may take in all, waiting included."""
    shutdown: float = Field(default=10.0, gt=0)
    """Seconds that requests in flight get to finish when the server stops."""


class ServeConfig(Config):
    """`ramify serve`."""

    model: ModelConfig = ModelConfig()
    renderer: RendererConfig = TemplateRendererConfig()
    inference: ManagedInferenceConfig = EngineConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="before")
    @classmethod
    def _inference_is_not_external(cls, data: Any) -> Any:
        """A run's own file may name servers that run already; such a run needs no `ramify serve`."""
        inference = data.get("inference") if isinstance(data, dict) else None
        if isinstance(inference, dict) and (inference.get("engine") == "external" or "base_url" in inference):
            said = "inference.base_url names servers that run already: there is nothing to serve"
            raise ValueError(f"{said}; leave it out, with inference.engine = 'native' or 'vllm'")
        return data

    @model_validator(mode="after")
    def _vllm_rejects_native_options(self) -> "ServeConfig":
        """What vLLM does by itself cannot be set here; a key that does nothing is an error."""
        if self.inference.engine == "vllm":
            if self.server.timeout != ServerConfig().timeout:
                raise ValueError("server.timeout needs inference.engine = 'native'; vLLM's clients bring deadlines")
            if self.server.allowed_hosts:
                raise ValueError("server.allowed_hosts needs inference.engine = 'native'; vLLM checks no host names")
            if self.renderer != TemplateRendererConfig():
                raise ValueError("renderer needs inference.engine = 'native'; vLLM renders chats by itself")
        return self
