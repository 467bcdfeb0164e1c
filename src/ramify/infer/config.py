"""How the engine and its server are set up. Importable without torch."""

from typing import Literal

from pydantic import Field, model_validator

from ramify.config import Config


class ModelConfig(Config):
    """The model to serve."""

    name: str = "tiny"
    """A packaged model, a directory, or a Hugging Face id that is in the local cache."""


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
    max_batch_tokens: int = Field(default=512, ge=1)
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
    """Run models of the Llama family with fused operators, after checking them against the model's own code."""

    @model_validator(mode="after")
    def _a_step_holds_every_running_request(self) -> "EngineConfig":
        if self.max_batch_tokens < self.max_running:
            found = f"{self.max_batch_tokens} < {self.max_running}"
            raise ValueError(f"max_batch_tokens must be at least max_running, so that every request advances ({found})")
        return self


class ServerConfig(Config):
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 lets the system choose; the address is printed."""
    timeout: float = Field(default=3600.0, gt=0)
    """Seconds a request may take in all, waiting included."""
    shutdown: float = Field(default=10.0, gt=0)
    """Seconds that requests in flight get to finish when the server stops."""


class ServeConfig(Config):
    """`ramify serve`."""

    model: ModelConfig = ModelConfig()
    inference: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
