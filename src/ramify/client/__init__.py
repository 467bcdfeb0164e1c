"""The token-in/token-out client: prompts as ids to one or several inference servers, sampled ids and logprobs back.

One idea: whoever samples should not know how many servers there are, which engine they run, or which of them has just
died. The client picks the server, keeps a session where its prefix is cached, sends nothing twice that may have been
sampled, and knows for every token which weights it came from. Nothing here imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.client.client import Client as Client
    from ramify.client.completion import Completion as Completion
    from ramify.client.completion import Sampling as Sampling
    from ramify.client.config import ClientConfig as ClientConfig
    from ramify.client.control import Acknowledgement as Acknowledgement

_FACE = {
    "Acknowledgement": "ramify.client.control",
    "Client": "ramify.client.client",
    "ClientConfig": "ramify.client.config",
    "Completion": "ramify.client.completion",
    "Sampling": "ramify.client.completion",
}

__all__ = ["Acknowledgement", "Client", "ClientConfig", "Completion", "Sampling"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.client' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value
