"""Inference: an engine on plain PyTorch and Hugging Face models with an HTTP server in front of it, or vLLM as a child.

`config` describes both without torch; `engine` runs the model in a thread of its own; `server` speaks HTTP.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.infer.config import EngineConfig as EngineConfig
    from ramify.infer.config import ExternalConfig as ExternalConfig
    from ramify.infer.config import ServeConfig as ServeConfig
    from ramify.infer.config import ServerConfig as ServerConfig
    from ramify.infer.config import VLLMConfig as VLLMConfig
    from ramify.infer.connect import open_client as open_client
    from ramify.infer.engine import Engine as Engine
    from ramify.infer.rendering import ChatRenderer as ChatRenderer
    from ramify.infer.request import Completion as Completion
    from ramify.infer.request import Sampling as Sampling
    from ramify.infer.vllm import VLLMServer as VLLMServer

_FACE = {
    "ChatRenderer": "ramify.infer.rendering",
    "Completion": "ramify.infer.request",
    "Engine": "ramify.infer.engine",
    "EngineConfig": "ramify.infer.config",
    "ExternalConfig": "ramify.infer.config",
    "Sampling": "ramify.infer.request",
    "ServeConfig": "ramify.infer.config",
    "ServerConfig": "ramify.infer.config",
    "VLLMConfig": "ramify.infer.config",
    "VLLMServer": "ramify.infer.vllm",
    "open_client": "ramify.infer.connect",
}

__all__ = [
    "ChatRenderer",
    "Completion",
    "Engine",
    "EngineConfig",
    "ExternalConfig",
    "Sampling",
    "ServeConfig",
    "ServerConfig",
    "VLLMConfig",
    "VLLMServer",
    "open_client",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.infer' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value
